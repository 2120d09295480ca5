#include "kernels.h"
#include "simd.h"

namespace taut {
namespace TAUT_SET {

#define TAUT_NAME_(set) #set
#define TAUT_NAME(set) TAUT_NAME_(set)

const Kernels kTable = {
    TAUT_NAME(TAUT_SET),
};

}  // namespace TAUT_SET
}  // namespace taut
