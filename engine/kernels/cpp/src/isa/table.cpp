#include "kernels.h"
#include "matmul.h"
#include "simd.h"

namespace taut {
namespace TAUT_SET {

#define TAUT_NAME_(set) #set
#define TAUT_NAME(set) TAUT_NAME_(set)

extern const MatmulKernels kMatmulFloat;
extern const MatmulKernels kMatmulInt;

const Kernels kTable = {
    TAUT_NAME(TAUT_SET),
    &kMatmulFloat,
    &kMatmulInt,
};

}  // namespace TAUT_SET
}  // namespace taut
