// Chooses one instruction set's kernels at run time; see ratel/dispatch.h.
//
// The processor is asked here, in code that every processor runs, not in files compiled for wider instruction sets.

#include "ratel/dispatch.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ratel {

namespace {

#if defined(__x86_64__)

// Not every compiler that builds the rest knows "f16c" as a name. Whether the system saves the registers is part of
// "avx2".
bool converts_float16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_float16();
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif

const Kernels& find_kernels(const std::string& isa, const std::string& origin) {
  std::string names;
  for (const Kernels* kernels : supported_kernels()) {
    if (isa == kernels->isa) {
      return *kernels;
    }
    names += std::string(names.empty() ? "" : ", ") + kernels->isa;
  }
  throw std::invalid_argument(origin + ": no kernels for '" + isa + "' here; this processor runs " + names);
}

}  // namespace

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported{&kBaselineKernels};
#if defined(__x86_64__)
  if (runs_avx2()) {
    supported.push_back(&kAvx2Kernels);
  }
  if (runs_avx512()) {
    supported.push_back(&kAvx512Kernels);
  }
#endif
  return supported;
}

const Kernels& select_kernels(const std::optional<std::string>& isa) {
  if (isa) {
    return find_kernels(*isa, "isa");
  }
  if (const char* forced = std::getenv("RATEL_FORCE_ISA")) {
    return find_kernels(forced, "RATEL_FORCE_ISA");
  }
  return *supported_kernels().back();
}

SquareRoot native_square_root() {
#if defined(__x86_64__)
  // MKL runs its AVX-512 code on Intel processors only, and its code for any x86 on AMD processors.
  if (__builtin_cpu_is("intel") && runs_avx512()) {
    return SquareRoot::mkl_avx512;
  }
  if (__builtin_cpu_is("amd")) {
    return SquareRoot::mkl_sse;
  }
#endif
  return SquareRoot::correct;
}

}  // namespace ratel
