// The ways in which LaunchMove moves bytes.
#ifndef JAXOPS_CUDA_CONCATENATE_FAMILIES_H_
#define JAXOPS_CUDA_CONCATENATE_FAMILIES_H_

#include <cuda_runtime_api.h>

#include "common/concatenate.h"

namespace jaxops::concatenate::cuda {

inline constexpr int64_t kSectorBytes = 32;  // of the memory

// Destinations of a launch, of which more are slower where they are cut byte by byte.
inline constexpr int64_t kManyCuts = 200;

// Bytes of rows of equal pieces of packs up to which LaunchEqual and LaunchTiles move large ones.
inline constexpr int64_t kLongestJoined = 64;
inline constexpr int64_t kLongestCut = 240;

inline constexpr int64_t kTableDestinations = 200;

// Whether MoveAlike can do it: a few equal pieces of one array, and nothing but them.
bool AreAlike(const Job& job, int64_t unit);
cudaError_t LaunchAlike(cudaStream_t stream, const Job& job, int64_t unit);

// Whether JoinWords can do it: two pieces, whose rows follow each other, before zeros.
bool JoinsTwo(const Job& job);
cudaError_t LaunchJoinTwo(cudaStream_t stream, const Job& job, int64_t unit);

// Whether MoveRuns can do it, and should.
bool HasFewRuns(const Job& job, int64_t unit);
cudaError_t LaunchRuns(cudaStream_t stream, const Job& job, int64_t unit);

// Whether MoveWhole can do it.
bool IsWhole(const Job& job, int64_t unit);
cudaError_t LaunchWhole(cudaStream_t stream, const Job& job);

// Whether Join can do it.
bool JoinsFew(const Job& job, int64_t unit);
cudaError_t LaunchJoin(cudaStream_t stream, const Job& job, int64_t unit);

cudaError_t LaunchCut(cudaStream_t stream, const Job& job, int64_t unit);

// Whether patterns repeat often enough and close enough to be worth working out, and MoveRows can:
// one source row follows the other, and words can be written as such.
bool HasManyRows(const Job& job, int64_t unit);
cudaError_t LaunchRows(cudaStream_t stream, const Job& job, int64_t unit);

cudaError_t LaunchLong(cudaStream_t stream, const Job& job, int64_t unit);

// Whether LaunchStretches can move this, and should: few and long rows of pieces.
bool MovesAsStretches(const Job& job, int64_t unit);
cudaError_t LaunchStretches(cudaStream_t stream, const Job& job, int64_t unit);

// Whether LaunchEqual can move this, and should: equal pieces, little of them or whole sectors.
bool MovesAsEqual(const Job& job, int64_t unit);
cudaError_t LaunchEqual(cudaStream_t stream, const Job& job, int64_t unit);

// Whether LaunchNarrow can move this, and should: few pieces of rows of few bytes.
bool MovesAsNarrow(const Job& job, int64_t unit);
cudaError_t LaunchNarrow(cudaStream_t stream, const Job& job, int64_t unit);

// Whether LaunchTiles can move this, and should.
bool MovesAsTiles(const Job& job, int64_t unit);
cudaError_t LaunchTiles(cudaStream_t stream, const Job& job, int64_t unit);

}  // namespace jaxops::concatenate::cuda

#endif  // JAXOPS_CUDA_CONCATENATE_FAMILIES_H_
