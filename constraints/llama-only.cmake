# Read by the build of llama-cpp-python (CMAKE_PROJECT_llama_cpp_INCLUDE). The bindings load llama
# and ggml only; llama.cpp's library for its own command-line tools, which the package always
# switches on, is 53 of the 178 files to compile. A plain variable hides the cached one.
set(LLAMA_BUILD_COMMON OFF)
