#include "kernels.h"
#include "matmul.h"
#include "simd.h"

namespace taut {
namespace TAUT_SET {

void attend(const AttendTask &task, float *part, float *work);
void attend_join(const AttendTask &task, float *parts, int32_t count, float *work);
void rms_norm(const float *x, int32_t rows, int32_t width, const float *weight, float eps,
              float *y);
void rotate_append(const Rotation &args, int32_t from, int32_t to);
RowPiece row_piece(const float *x, int32_t width, bool weigh);

#define TAUT_NAME_(set) #set
#define TAUT_NAME(set) TAUT_NAME_(set)

extern const MatmulKernels kMatmulFloat;
extern const MatmulKernels kMatmulInt;

const Kernels kTable = {
    TAUT_NAME(TAUT_SET), attend, attend_join, rms_norm, rotate_append, row_piece,
    &kMatmulFloat, &kMatmulFloat, &kMatmulInt,
};

}  // namespace TAUT_SET
}  // namespace taut
