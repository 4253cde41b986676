// The limits of convolution, whose handlers are those of CUDA devices alone.
#include "common/conv.h"

#include "ffi/limits.h"

namespace jaxops::ffi {
namespace {

namespace cv = jaxops::conv;

const Limit kLimits[] = {
    {"conv", "max_taps", cv::kMaxTaps},
    {"conv", "max_stride", cv::kMaxStride},
    {"conv", "max_pixels", cv::kMaxPixels},
    {"conv", "max_groups", cv::kMaxGroups},
    {"conv", "max_kernel_bytes", cv::kMaxKernelBytes},
    {"conv", "channel_bytes", cv::kChannelBytes},
    {"conv", "min_fan", cv::kMinFan},
    {"conv", "max_few_channels", cv::kMaxFewChannels},
    {"conv", "max_few_tap_rows", cv::kMaxFewTapRows},
    {"conv", "max_few_row_entries", cv::kMaxFewRowEntries},
    {"conv", "max_few_outputs", cv::kMaxFewOutputs},
};

}  // namespace
}  // namespace jaxops::ffi
