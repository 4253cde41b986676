# Refuses a compiler without the parts of C++20 that the sources use, in a sentence of its own: the
# errors of such a compiler would fill pages.

include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_QUIET ON)
check_cxx_source_compiles([[
#include <bit>
#include <concepts>
#include <span>
static constinit int number = 8;
template <std::integral T>
T Width(std::span<const T> s) {
  return [&]<typename U>(U first) { return std::bit_width(static_cast<unsigned>(first)); }(s[0]);
}
int main() { return Width(std::span<const int>(&number, 1)); }
]] JAXOPS_HAS_CXX20)
if(NOT JAXOPS_HAS_CXX20)
  message(FATAL_ERROR "jaxops needs a C++20 compiler, such as GCC 11 or Clang 16, and "
    "${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) is none; name "
    "another one in CXX.")
endif()
