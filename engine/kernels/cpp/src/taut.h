// The library's C interface: what engine/kernels/cpp/library.py calls. Pointers are to memory of
// the caller's, floats are float32, all matrices are row-major. Nothing is checked here: shapes and
// dtypes are checked in Python, once, when an op is built. Calls that may take memory return 0, or
// -1 when there is none.
#pragma once

#include <stdint.h>

#ifdef TAUT_BUILDING
#define TAUT_API extern "C" __attribute__((visibility("default")))
#else
#define TAUT_API extern "C"
#endif

// Goes up with every change of this file: library.py refuses a library with another number.
#define TAUT_ABI 2

TAUT_API int32_t taut_abi(void);

// -- contexts: threads and an instruction set ---------------------------------------------------

// Instruction sets, each with all that the ones before it have.
enum {
  TAUT_ISA_PORTABLE,
  TAUT_ISA_AVX2,
  TAUT_ISA_AVX512,
  TAUT_ISA_VNNI,
  TAUT_ISA_BF16,
  TAUT_ISA_AMX  // and half floats
};

typedef struct taut_context taut_context;

// The best set that this processor has and the library was built with.
TAUT_API int32_t taut_best_set(void);
// Threads, the caller's included, and a set of at most taut_best_set(). Calls on one context take
// turns; contexts are independent of each other.
TAUT_API taut_context *taut_open(int32_t threads, int32_t set);
TAUT_API void taut_close(taut_context *context);

// -- matrices -------------------------------------------------------------------------------------

// Number formats of weights, and of cells (the first two).
enum { TAUT_F32 = 0, TAUT_BF16 = 1, TAUT_INT8 = 2, TAUT_NVFP4 = 3 };

// W [outs, ins], in panels of 16 outputs and blocks of 16 inputs, both filled up:
//   F32    [panel][ins][16]
//   BF16   [panel][ins / 2][16][2]: two inputs of one output side by side
//   INT8   [panel][ins / 4][16][4]: code + 128, with a scale a row
//   NVFP4  [panel][ins / 16][128]: 16 x 16 codes; byte 4 r + b of the first 64 has in its low nibble
//          row r's input b, in its high nibble input 4 + b; the last 64 have inputs 8 to 15 alike.
//          `blocks` [panel][ins / 16][16] are their E4M3 scales.
// A value is code * block scale * row scale. Memory starts at a multiple of 64 bytes.
typedef struct {
  int32_t format;
  int32_t outs;
  int32_t ins;
  void *values;
  uint8_t *blocks;      // NVFP4 only
  const float *scales;  // [outs, filled up to panels], INT8 and NVFP4 only: null for others
  const float *bias;    // [outs, filled up to panels], or null
} taut_weight;

// Some rows [rows, ins] of a weight as checkpoints have them, each in one piece: floats of F32 or
// BF16, int8 codes, or NVFP4's pairs of codes (the even input in the low nibble) and E4M3 scales.
typedef struct {
  int32_t format;
  int32_t rows;
  void *values;
  uint8_t *blocks;  // NVFP4 only: [rows, ins / 16]
} taut_plain;

// Rows into their panels: row r goes to output `first` + r of the panels `from`, `from` + `step`
// and so on (0 and 1: of all of them). Other outputs aren't touched; panels start as zeros. A weight
// of F32 or BF16 takes rows of either.
TAUT_API void taut_pack(taut_context *context, const taut_weight *weight, const taut_plain *plain,
                        int32_t first, int32_t from, int32_t step);
// And back, in the weight's own format.
TAUT_API void taut_unpack(taut_context *context, const taut_weight *weight, const taut_plain *plain,
                          int32_t first, int32_t from, int32_t step);

// Blocks of 16 values, F32 or BF16, to NVFP4, in two passes: the greatest magnitude of each (NaN if
// there is one), then, with what those give for the tensor, 1 / its scale and the scale, the blocks'
// E4M3 scales and pairs of codes. On the caller's thread.
TAUT_API void taut_nvfp4_peaks(const void *values, int32_t format, int64_t blocks, float *peaks);
TAUT_API void taut_nvfp4_encode(const void *values, int32_t format, int64_t blocks,
                                const float *peaks, float inverse, float tensor, uint8_t *scales,
                                uint8_t *codes);

// What becomes of x W^T + bias.
enum {
  TAUT_STORE = 0,  // y = it
  TAUT_ADD = 1,    // y += it: a residual stream
  TAUT_SWIGLU = 2  // panels come in pairs, 16 gates and their 16 ups: y = silu(gate) * up
};

// x [rows, ins] -> y [rows, outs], or [rows, outs / 2] for TAUT_SWIGLU; strides in floats. A row's
// result has the same bits however many rows run with it and whatever the threads.
// `bits` of activations: 0 for float32; 8 or 16: rounded to integers on the way, with a scale for
// each block of 16 (INT8 and NVFP4 weights; others ignore it).
TAUT_API int32_t taut_matmul(taut_context *context, const taut_weight *weight, const float *x,
                             int64_t x_stride, int32_t rows, float *y, int64_t y_stride,
                             int32_t then, int32_t bits);

// -- cells ----------------------------------------------------------------------------------------

// Pools of packed pages, of 64 cells each: codes of 2, 4 or 8 bits and their grids in float16, as
// engine/kernels/packed.py has them. Positions [pages, 64] and biases, or null, as below.
typedef struct {
  const uint8_t *k;        // [pages, dim, 16] times four codes
  const uint16_t *k_grid;  // [pages, 2, dim]
  const uint8_t *v;        // [pages, 16, dim] times four codes
  const uint16_t *v_grid;  // [pages, 2, runs, 64]
  const int32_t *pos;
  const float *bias;
  int32_t bits;
  int32_t runs;  // of channels whose values share a grid: as many to each, a multiple of 16
} taut_packed;

// The pools: K and V [pages, 16, dim] of F32 or BF16, positions [pages, 16], and what is added to a
// cell's logit [pages, 16], or null.
typedef struct {
  void *k;
  void *v;
  const int32_t *pos;
  const float *bias;
  int32_t format;
  int32_t dim;
  const taut_packed *packed;  // or null: there are none
} taut_cells;

// Which cells each of `rows` sequences has, and which tokens of this step are its own.
typedef struct {
  int32_t rows;
  int32_t heads;             // kv heads
  const int32_t *first;      // [rows + 1] each row's first token; the last entry is their number
  const int32_t *pos;        // [tokens]
  const int32_t *table;      // page ids: head h of row r has them from table_at[r] + h * width on
  const int64_t *table_at;   // [rows]
  int64_t width;
  const int32_t *lengths;    // cells held, those of this step included: at length_at[r] + h
  const int64_t *length_at;  // [rows]
  // Packed pages, whose cells come before those; only where taut_cells has any. Head h of row r has
  // them from group_at[r] + h * groups on, and of each as many cells, from the first on, as `fills`
  // has at the same place: 0 after its last page.
  const int32_t *packed;
  const int32_t *fills;
  const int64_t *group_at;  // [rows]
  int64_t groups;
} taut_rows;

// q [tokens, q_heads, dim] -> out, alike; scale 1 / sqrt(dim). A query sees a cell of its kv head
// that is held and whose position is at most its own; one that sees nothing gets zeros. Cells that
// aren't held may hold anything, NaN too. Cells are read in fixed splits joined in order, a packed
// page being one: a query's result has the same bits whatever runs beside it.
TAUT_API int32_t taut_attend(taut_context *context, const taut_cells *cells, const taut_rows *rows,
                             int32_t q_heads, const float *q, float *out);

// -- rows of a residual stream --------------------------------------------------------------------

// y [rows, width] = x / rms(x) * weight.
TAUT_API void taut_rms_norm(taut_context *context, const float *x, int32_t rows, int32_t width,
                            const float *weight, float eps, float *y);

// heads [tokens, q_heads + 2 kv_heads, dim], as a q, k, v projection leaves them: q and k are normed
// by head where qk_norm [q_heads + kv_heads, dim] isn't null, turned by cos, sin [tokens, dim / 2]
// (dimension i with i + dim / 2), q goes to q [tokens, q_heads, dim], k and v to cells `at` [tokens,
// kv_heads]. A value that isn't finite is stored as 0.
TAUT_API void taut_rotate_append(taut_context *context, const float *heads, int32_t tokens,
                                 int32_t q_heads, int32_t kv_heads, const float *qk_norm, float eps,
                                 const float *cos, const float *sin, float *q,
                                 const taut_cells *cells, const int64_t *at);

// Of each row of logits [rows, width]: the greatest entry's index (the first of equals; -1 if there
// is a NaN) and value, log-sum-exp, and the entropy of the distribution in nats. Any may be null.
TAUT_API int32_t taut_row_stats(taut_context *context, const float *logits, int32_t rows,
                                int32_t width, int64_t *best, float *greatest, float *logsumexp,
                                float *entropy);

// -- layers ---------------------------------------------------------------------------------------

typedef struct {
  int32_t hidden;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t inner;
  float eps;
  int32_t bits;  // of activations, as in taut_matmul
} taut_shape;

typedef struct {
  const float *attn_norm;     // [hidden]
  const float *qk_norm;       // [q_heads + kv_heads, dim], or null
  const float *mlp_norm;      // [hidden]
  const taut_weight *qkv;     // [(q_heads + 2 kv_heads) dim, hidden]
  const taut_weight *out;     // [hidden, q_heads dim]
  const taut_weight *gate_up; // [2 inner, hidden], panels in pairs
  const taut_weight *down;    // [hidden, inner]
} taut_layer;

// One step's tokens and the cache that they are appended to. Rows have `counts` tokens each, from
// position `starts` on; the tables don't count them yet. `ring` remembers queries: that of token t
// goes to ring_at[t] (in floats, -1: nowhere) of a layer's ring.
typedef struct {
  taut_cells cells;
  int32_t *pos;             // cells.pos, to be written
  const int32_t *table;     // [slots, layers, kv_heads, width]
  const int32_t *lengths;   // [slots, layers, kv_heads]
  const int32_t *packed;    // [slots, layers, kv_heads, groups], as in taut_rows
  const int32_t *fills;     // alike
  int32_t layers;
  int64_t width;
  int64_t groups;
  int32_t rows;
  const int64_t *slots;     // [rows]
  const int64_t *starts;    // [rows]
  const int64_t *counts;    // [rows]
  float *ring;              // [layers, ring_layer], or null
  int64_t ring_layer;
  const int64_t *ring_at;   // [tokens]
} taut_step;

// Decoder layers `first` to `last` - 1: cells are appended, x [tokens, hidden] becomes what leaves
// the last of them, normed by `norm` [hidden] if that isn't null. cos, sin [tokens, dim / 2]. The
// same as the calls above, one after the other.
TAUT_API int32_t taut_layers(taut_context *context, const taut_shape *shape,
                             const taut_layer *layers, int32_t first, int32_t last,
                             const taut_step *step, const float *cos, const float *sin,
                             const float *norm, float *x);
