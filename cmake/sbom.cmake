# Writes what is compiled into the modules, with versions and licences, as CycloneDX, and installs it where
# PEP 770 says, and where PEP 639 says the licences that ask to be passed on: Apache-2.0 is jaxops' own.

set(components "")

# `licence` is an SPDX expression.
function(jaxops_component name version licence purl what)
  set(component [[{
      "type": "library",
      "bom-ref": "@purl@",
      "name": "@name@",
      "version": "@version@",
      "description": "@what@",
      "licenses": [{"expression": "@licence@"}],
      "purl": "@purl@"
    }]])
  string(CONFIGURE "${component}" component @ONLY)
  set(components ${components} "${component}" PARENT_SCOPE)
endfunction()

jaxops_component(nanobind ${nanobind_version} "BSD-3-Clause AND MIT"
  "pkg:pypi/nanobind@${nanobind_version}" "the library of the modules, with robin-map inside")
jaxops_component(jaxlib ${JAXLIB_VERSION} Apache-2.0
  "pkg:pypi/jaxlib@${JAXLIB_VERSION}" "the headers of XLA's foreign function interface")
if(NOT JAXOPS_CPU_ONLY)
  jaxops_component("CUDA Runtime" ${JAXOPS_NVCC_VERSION} LicenseRef-NVIDIA-CUDA-Toolkit-EULA
    "pkg:generic/cuda-runtime@${JAXOPS_NVCC_VERSION}" "libcudart_static of the CUDA toolkit")
  find_file(cub_version_header cub/version.cuh NO_DEFAULT_PATH REQUIRED
    PATHS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  file(STRINGS "${cub_version_header}" cub_version REGEX "define CUB_VERSION [0-9]+")
  string(REGEX MATCH "[0-9]+" cub_version "${cub_version}")
  math(EXPR major "${cub_version} / 100000")
  math(EXPR minor "${cub_version} / 100 % 1000")
  math(EXPR patch "${cub_version} % 100")
  jaxops_component(CCCL ${major}.${minor}.${patch}
    "Apache-2.0 WITH LLVM-exception AND BSD-3-Clause AND BSL-1.0"
    "pkg:github/NVIDIA/cccl@v${major}.${minor}.${patch}" "CUB and libcu++, of the CUDA toolkit")
endif()
if("$ENV{JAXOPS_WHEEL_LIBRARIES}" STREQUAL "debian11")
  jaxops_component("libstdc++" 10.2 "GPL-3.0-or-later WITH GCC-exception-3.1"
    "pkg:deb/debian/libstdc++-10-dev@10.2" "the C++ library, linked statically")
endif()
list(JOIN components ",\n    " components)

set(tools "{\"type\": \"application\", \"name\": \"${CMAKE_CXX_COMPILER_ID}\", \"version\": \"${CMAKE_CXX_COMPILER_VERSION}\"}")
if(NOT JAXOPS_CPU_ONLY)
  string(APPEND tools ",\n      {\"type\": \"application\", \"name\": \"nvcc\", \"version\": \"${JAXOPS_NVCC_VERSION}\"}")
endif()

file(CONFIGURE OUTPUT jaxops.cdx.json @ONLY CONTENT [[{
  "bomFormat": "CycloneDX",
  "specVersion": "1.6",
  "version": 1,
  "metadata": {
    "component": {
      "type": "library",
      "bom-ref": "pkg:pypi/jaxops@@SKBUILD_PROJECT_VERSION@",
      "name": "jaxops",
      "version": "@SKBUILD_PROJECT_VERSION@",
      "licenses": [{"expression": "Apache-2.0"}],
      "purl": "pkg:pypi/jaxops@@SKBUILD_PROJECT_VERSION@"
    },
    "tools": {"components": [
      @tools@
    ]}
  },
  "components": [
    @components@
  ]
}
]])

if(SKBUILD)
  install(FILES "${PROJECT_BINARY_DIR}/jaxops.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
  set(licences "${SKBUILD_METADATA_DIR}/licenses")
  file(GLOB nanobind_licence
    "${nanobind_cmake_dir}/../../nanobind-${nanobind_version}.dist-info/licenses/LICENSE")
  file(GLOB robin_map "${nanobind_copy}/ext/robin_map/include/tsl/robin_map.h")
  if(nanobind_licence AND robin_map)
    configure_file("${nanobind_licence}" nanobind/LICENSE COPYONLY)
    # robin-map has its licence in the first comment of its header.
    file(READ "${robin_map}" text LIMIT 4000)
    string(FIND "${text}" "*/" end)
    string(SUBSTRING "${text}" 0 ${end} text)
    file(CONFIGURE OUTPUT robin_map/LICENSE CONTENT "${text}*/\n" @ONLY)
    install(FILES "${PROJECT_BINARY_DIR}/nanobind/LICENSE" DESTINATION "${licences}/nanobind")
    install(FILES "${PROJECT_BINARY_DIR}/robin_map/LICENSE" DESTINATION "${licences}/robin_map")
  else()
    message(WARNING "jaxops: nanobind ${nanobind_version} has no licences where they are looked for; "
      "a wheel that is passed on must have them")
  endif()
endif()
