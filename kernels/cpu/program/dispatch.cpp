#include "dispatch.h"

#include <atomic>

#include "system.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && AIOENGINE_LINUX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && AIOENGINE_LINUX
#include <sys/auxv.h>
#endif

namespace aioengine {

namespace {

#if !defined(__aarch64__)
constexpr DispatchTable GENERIC = {
    "generic", &kernels_generic, &linear_generic, nullptr, &int8_gemm_generic,
    nullptr, &norm_generic, &rotary_generic, &argmax_generic, &weights_generic};
#endif

#if defined(__x86_64__)
constexpr DispatchTable AMX_BF16 = {
    "amx_bf16", &kernels_amx_bf16, &linear_avx512_bf16, &bf16_gemm_amx_bf16, &int8_gemm_avx512_vnni,
    &grouped_bf16_avx512_bf16, &norm_avx512_bf16, &rotary_avx512_bf16, &argmax_avx512, &weights_avx512};
constexpr DispatchTable AVX512_BF16 = {
    "avx512_bf16", &kernels_avx512_bf16, &linear_avx512_bf16, &bf16_gemm_avx512_bf16, &int8_gemm_avx512_vnni,
    &grouped_bf16_avx512_bf16, &norm_avx512_bf16, &rotary_avx512_bf16, &argmax_avx512, &weights_avx512};
constexpr DispatchTable AVX512_VNNI = {
    "avx512_vnni", &kernels_avx512, &linear_avx512, nullptr, &int8_gemm_avx512_vnni,
    nullptr, &norm_avx512, &rotary_avx512, &argmax_avx512, &weights_avx512};
constexpr DispatchTable AVX512 = {
    "avx512", &kernels_avx512, &linear_avx512, nullptr, &int8_gemm_avx2,
    nullptr, &norm_avx512, &rotary_avx512, &argmax_avx512, &weights_avx512};
constexpr DispatchTable AVX2 = {
    "avx2", &kernels_avx2, &linear_avx2, nullptr, &int8_gemm_avx2,
    nullptr, &norm_avx2, &rotary_avx2, &argmax_avx2, &weights_avx2};

// Clang does not know this one by name.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// Whether there are tiles for bfloat16 and Linux lets this process have them.
bool may_use_tiles() {
#if AIOENGINE_LINUX
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & (1u << 22)) || !(d & (1u << 24))) return false;
    constexpr int ask_permission = 0x1023, tile_data = 18;  // asm/prctl.h has them since 5.16
    return syscall(SYS_arch_prctl, ask_permission, tile_data) == 0;
#else
    return false;
#endif
}

const DispatchTable* by_name(const std::string& name) {
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
    static const bool has_tiles = has_bf16 && may_use_tiles();
    if ((name == "best" || name == "amx_bf16") && has_tiles) return &AMX_BF16;
    if ((name == "best" || name == "avx512_bf16") && has_bf16) return &AVX512_BF16;
    if ((name == "best" || name == "avx512_vnni") && has_vnni) return &AVX512_VNNI;
    if ((name == "best" || name == "avx512") && has_avx512) return &AVX512;
    if ((name == "best" || name == "avx2") && has_avx2) return &AVX2;
    return name == "best" || name == "generic" ? &GENERIC : nullptr;
}
#elif defined(__aarch64__)
constexpr DispatchTable NEON_BF16 = {
    "neon_bf16", &kernels_neon_bf16, &linear_neon_bf16, &bf16_gemm_neon_bf16, &int8_gemm_neon_i8mm,
    nullptr, &norm_neon_bf16, &rotary_neon_bf16, &argmax_neon, &weights_neon};
constexpr DispatchTable NEON_DOTPROD = {
    "neon_dotprod", &kernels_neon, &linear_neon, nullptr, &int8_gemm_neon_dotprod,
    nullptr, &norm_neon, &rotary_neon, &argmax_neon, &weights_neon};
constexpr DispatchTable NEON = {
    "neon", &kernels_neon, &linear_neon, nullptr, &int8_gemm_neon,
    nullptr, &norm_neon, &rotary_neon, &argmax_neon, &weights_neon};

// What the CPU has beyond NEON. Only Linux is asked; elsewhere there is as much of it as the compiler takes for
// granted, as Apple's does with dot products.
struct Features {
    bool has_dotprod, has_bf16;
};

Features features() {
#if AIOENGINE_LINUX
    constexpr unsigned long dotprod = 1ul << 20, i8mm = 1ul << 13, bf16 = 1ul << 14;  // asm/hwcap.h
    const bool has_dotprod = getauxval(AT_HWCAP) & dotprod;
    return {has_dotprod, has_dotprod && (getauxval(AT_HWCAP2) & (i8mm | bf16)) == (i8mm | bf16)};
#else
    return {};
#endif
}

const DispatchTable* by_name(const std::string& name) {
    static const Features found = features();
    if ((name == "best" || name == "neon_bf16") && found.has_bf16) return &NEON_BF16;
    if ((name == "best" || name == "neon_dotprod") && found.has_dotprod) return &NEON_DOTPROD;
    return name == "best" || name == "neon" ? &NEON : nullptr;
}
#else
const DispatchTable* by_name(const std::string& name) {
    return name == "best" || name == "generic" ? &GENERIC : nullptr;
}
#endif

std::atomic<const DispatchTable*> chosen{by_name("best")};

}  // namespace

const DispatchTable& dispatch_table() {
    return *chosen.load();
}

std::string instruction_set(std::string name) {
    if (const DispatchTable* found = name.empty() ? nullptr : by_name(name)) chosen = found;
    return chosen.load()->name;
}

int64_t places_at_once() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") ? 8 : 1;
#else
    return 1;
#endif
}

}  // namespace aioengine
