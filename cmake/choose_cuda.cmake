# Chooses whether the CUDA module is built, with which nvcc, and for which GPUs. JAXOPS_CUDA and
# JAXOPS_CUDA_ARCHS of the environment steer it, as docs/install.md says. It sets
#   JAXOPS_CPU_ONLY           the reason where only the CPU module is built, empty otherwise
#   JAXOPS_NVCC               the compiler
#   JAXOPS_NVCC_VERSION       its version
#   CMAKE_CUDA_ARCHITECTURES  what it compiles for
# Tests run it as a script, and set JAXOPS_NVCC, JAXOPS_NVIDIA_SMI and JAXOPS_GPU_DEVICES to stand
# for another machine.

set(needed_gpu "the kernels need compute capability 8.0 or newer")
# The first with all of cuda::ptx that the kernels include.
set(oldest_nvcc 12.5)

set(JAXOPS_CUDA "$ENV{JAXOPS_CUDA}")
if(JAXOPS_CUDA STREQUAL "")  # not if(NOT ...): "off" is false too
  set(JAXOPS_CUDA auto)
endif()
if(NOT JAXOPS_CUDA MATCHES "^(on|off|auto)$")
  message(FATAL_ERROR "JAXOPS_CUDA must be on, off or auto, got '${JAXOPS_CUDA}'.")
endif()
if(JAXOPS_CUDA STREQUAL off)
  set(JAXOPS_CPU_ONLY "JAXOPS_CUDA was off")
  return()
endif()

# --- GPUs ----------------------------------------------------------------------------------------

set(CMAKE_CUDA_ARCHITECTURES "$ENV{JAXOPS_CUDA_ARCHS}")
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$")
    message(FATAL_ERROR "JAXOPS_CUDA_ARCHS has '${architecture}'; it must be a list such as "
      "'80;90a;90-virtual'.")
  endif()
  if(CMAKE_MATCH_1 LESS 80)
    message(FATAL_ERROR "JAXOPS_CUDA_ARCHS has ${architecture}, but ${needed_gpu}, which is 80.")
  endif()
  # Older PTX lacks what newer GPUs are asked to do; that of one GPU's features runs on no other.
  if(architecture MATCHES "-virtual$" AND NOT architecture MATCHES "^(9|[1-9][0-9])[0-9]-virtual$")
    message(FATAL_ERROR "JAXOPS_CUDA_ARCHS has ${architecture}: PTX must be 90-virtual or a later "
      "one without a letter.")
  endif()
endforeach()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  find_program(JAXOPS_NVIDIA_SMI nvidia-smi HINTS /usr/lib/wsl/lib NO_CACHE)
  set(capabilities "")
  if(JAXOPS_NVIDIA_SMI)
    execute_process(COMMAND "${JAXOPS_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE output RESULT_VARIABLE failed ERROR_QUIET TIMEOUT 60)
    if(failed EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${output}")
    endif()
    list(REMOVE_DUPLICATES capabilities)
    list(SORT capabilities COMPARE NATURAL)
  endif()
  # Containers may have a GPU without nvidia-smi.
  if(NOT DEFINED JAXOPS_GPU_DEVICES)
    file(GLOB JAXOPS_GPU_DEVICES "/dev/nvidia[0-9]*")
  endif()

  set(new_capabilities "${capabilities}")
  list(FILTER new_capabilities EXCLUDE REGEX "^[0-7]\\.")
  if(capabilities AND NOT new_capabilities)
    list(JOIN capabilities ", " capabilities)
    set(JAXOPS_CPU_ONLY "the GPUs here have ${capabilities}, and ${needed_gpu}")
    if(JAXOPS_CUDA STREQUAL on)
      message(FATAL_ERROR "JAXOPS_CUDA=on, but ${JAXOPS_CPU_ONLY}.")
    endif()
    return()
  endif()
  if(JAXOPS_CUDA STREQUAL auto AND NOT capabilities AND NOT JAXOPS_GPU_DEVICES)
    set(JAXOPS_CPU_ONLY "no GPU was found")
    return()
  endif()

  # PTX is for GPUs that are newer than all of these.
  list(TRANSFORM new_capabilities REPLACE "\\." "")
  set(CMAKE_CUDA_ARCHITECTURES "${new_capabilities}")
  list(POP_BACK new_capabilities newest)
  if(NOT newest)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  if(NOT newest OR newest LESS 90)
    set(newest 90)
  endif()
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual)
endif()

# --- the compiler --------------------------------------------------------------------------------

# In CUDA_HOME, in the usual place, from the nvidia-cuda-nvcc wheels, or on the path.
file(GLOB wheel_nvcc_dirs "${Python_SITELIB}/nvidia/*/bin")
find_program(JAXOPS_NVCC nvcc NO_CACHE
  HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin ${wheel_nvcc_dirs})
if(NOT JAXOPS_NVCC)
  if(JAXOPS_CUDA STREQUAL on)
    message(FATAL_ERROR "JAXOPS_CUDA=on, but no nvcc was found. Install the CUDA toolkit and put "
      "nvcc on the PATH, or set CUDA_HOME.")
  endif()
  set(JAXOPS_CPU_ONLY "no nvcc was found")
  return()
endif()
execute_process(COMMAND "${JAXOPS_NVCC}" --version OUTPUT_VARIABLE nvcc_output ERROR_QUIET)
string(REGEX MATCH "V([0-9]+\\.[0-9]+\\.[0-9]+)" matched "${nvcc_output}")
set(JAXOPS_NVCC_VERSION "${CMAKE_MATCH_1}")
if(NOT matched OR JAXOPS_NVCC_VERSION VERSION_LESS oldest_nvcc)
  message(FATAL_ERROR "${JAXOPS_NVCC} is of version ${JAXOPS_NVCC_VERSION}, and the CUDA module "
    "needs CUDA ${oldest_nvcc} or newer; JAXOPS_CUDA=off builds for the CPU only.")
endif()
execute_process(COMMAND "${JAXOPS_NVCC}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  string(REGEX MATCH "^[0-9]+" number "${architecture}")
  if(NOT known MATCHES "compute_${number}[^0-9]")
    message(FATAL_ERROR "nvcc ${JAXOPS_NVCC_VERSION} cannot compile for ${architecture}; install "
      "another CUDA toolkit, or name other architectures in JAXOPS_CUDA_ARCHS.")
  endif()
endforeach()
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND -real REGEX "^[0-9]+[af]?$")
set(JAXOPS_CPU_ONLY "")
