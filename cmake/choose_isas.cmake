# Chooses the instruction sets of the CPU kernels: JAXOPS_ISAS. JAXOPS_CPU_ISAS of the environment is
# `auto`, the best of this machine; `all`, of which every machine takes its best; or a list.

set(JAXOPS_ISAS baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND JAXOPS_ISAS avx2 avx512)
endif()
set(asked "$ENV{JAXOPS_CPU_ISAS}")
if(asked STREQUAL "" OR asked STREQUAL "auto")
  # A build for another machine has all.
  if(NOT CMAKE_CROSSCOMPILING)
    try_run(code compiled SOURCES "${CMAKE_CURRENT_LIST_DIR}/best_isa.cc" NO_CACHE
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_LIST_DIR}/.."
      RUN_OUTPUT_STDOUT_VARIABLE best COMPILE_OUTPUT_VARIABLE errors)
    if(NOT compiled OR NOT code EQUAL 0 OR NOT best IN_LIST JAXOPS_ISAS)
      message(FATAL_ERROR "jaxops: cmake/best_isa.cc does not run: ${code} ${best} ${errors}; name "
        "instruction sets in JAXOPS_CPU_ISAS")
    endif()
    set(JAXOPS_ISAS "${best}")
  endif()
elseif(NOT asked STREQUAL "all")
  list(REMOVE_DUPLICATES asked)
  foreach(isa IN LISTS asked)
    if(NOT isa IN_LIST JAXOPS_ISAS)
      list(JOIN JAXOPS_ISAS ", " known)
      message(FATAL_ERROR "JAXOPS_CPU_ISAS has '${isa}'; it is auto, all, or a list of ${known}, "
        "such as avx2;avx512")
    endif()
  endforeach()
  set(JAXOPS_ISAS "${asked}")
endif()
