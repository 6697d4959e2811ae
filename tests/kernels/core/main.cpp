// The kernels' core, without torch, beside plain references: each instruction set that this CPU or emulator has, on
// one thread and on three.
//
//     core_checks [SEED [INSTRUCTION_SET]]
//
// The last line of each set says how many checks there were and how many failed. run.py builds it.

#include <cstdlib>

#include "problems.h"

namespace checks {

std::vector<DType> dtypes() {
    std::vector<DType> found = {DType::Float32, DType::BFloat16};
    if (dispatch_table().attention->has_float16) found.push_back(DType::Float16);
    return found;
}

}  // namespace checks

int main(int count, char** arguments) {
    using namespace checks;
    const uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
    const std::string only = count > 2 ? arguments[2] : "";
    int64_t sets = 0, failures = 0;
    for (const char* name :
         {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16", "neon", "neon_dotprod",
          "neon_bf16"}) {
        if ((!only.empty() && only != name) || instruction_set(name) != name) continue;
        Report report;
        Random random(seed);
        check_rows(report, random);
        check_linear(report, random);
        check_grouped(report, random);
        check_experts(report, random);
        check_attention(report, random);
        std::printf("%s: %lld checks, %lld failed\n", name, (long long)report.checks, (long long)report.failures);
        std::fflush(stdout);
        ++sets;
        failures += report.failures;
    }
    if (sets == 0) std::printf("there is no such instruction set here\n");
    return sets == 0 || failures != 0;
}
