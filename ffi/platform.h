// The platform of the module that a source of handlers is compiled for. Each is compiled for both.
//
//   Context                        the stream or threads on which a handler runs kernels
//   kHasWorkSpace                  whether calls may have a work space
//   JAXOPS_KERNEL(operator, name)  the function that runs the kernels of a call
//   Run(context, operation, kernel, call, more...)
//                                  runs the kernels; CUDA devices have more arguments
//   ExpectWrites(result)           is called before kernels that only move memory
#ifndef JAXOPS_FFI_PLATFORM_H_
#define JAXOPS_FFI_PLATFORM_H_

#ifdef JAXOPS_PLATFORM_CUDA
#include "ffi/platform_cuda.h"
#else
#include "ffi/platform_cpu.h"
#endif

#endif  // JAXOPS_FFI_PLATFORM_H_
