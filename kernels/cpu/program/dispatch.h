// Kernels by instruction set, and which of them are in use.

#pragma once

#include <string>

#include "argmax.h"
#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"
#include "weights.h"

namespace aioengine {

// One instruction set's kernels. `bf16_gemm`: null where the CPU does not multiply bfloat16. `int8_gemm`: the
// best for bytes that the CPU has beside it. `grouped_bf16`: null where weights in groups are multiplied as floats.
struct DispatchTable {
    const char* name;
    const AttentionKernels* attention;
    const LinearKernels* linear;
    const LinearKernels* bf16_gemm;
    const LinearKernels* int8_gemm;
    const LinearKernels* grouped_bf16;
    const NormKernel* norm;
    const RotaryKernel* rotary;
    const ArgmaxKernel* argmax;
    const WeightsKernels* weights;
};

// The table in use: the best of this CPU's, unless another one was chosen.
const DispatchTable& dispatch_table();

// The name of the instruction set in use, after choosing that of `name` if this CPU has it. "" chooses none.
std::string instruction_set(std::string name);

// Places that weights are prefetched from at once. Where cores fetch ahead within a page by themselves, as
// Intel's do (Sapphire Rapids), memory gives a third more with eight ends to go on from than where lines
// are prefetched one after the other. AMD's (Zen 5) follow the one end further than that, and eight take a
// quarter from it (docs/decisions/prefetch.md).
int64_t places_at_once();

}  // namespace aioengine
