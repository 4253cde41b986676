# Writes what is compiled into the modules, with versions and licences, as CycloneDX, and installs it with
# the licences of what is redistributed, where PEP 770 and PEP 639 say.

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
  jaxops_component(CCCL ${JAXOPS_NVCC_VERSION}
    "Apache-2.0 WITH LLVM-exception AND BSD-3-Clause AND BSL-1.0"
    "pkg:generic/cccl@${JAXOPS_NVCC_VERSION}" "CUB and libcu++, as the CUDA toolkit has them")
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
  file(GLOB nanobind_licences
    "${nanobind_cmake_dir}/../../nanobind-${nanobind_version}.dist-info/licenses")
  if(nanobind_licences)
    install(DIRECTORY "${nanobind_licences}/"
      DESTINATION "${SKBUILD_METADATA_DIR}/licenses/nanobind")
  endif()
endif()
