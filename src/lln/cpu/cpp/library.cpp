// Tells what a library was made of, and which of its passes the processor at hand can run.
#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED const char* lln_sources() { return LLN_SOURCES; }

// The best instruction set that the processor knows and the system allows, by the name that the
// functions of `passes.cpp` carry.
EXPORTED const char* lln_instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd"))
    return "avx512";
  return has_avx2 ? "avx2" : "sse2";
#else
  return "neon";
#endif
}

}  // extern "C"
