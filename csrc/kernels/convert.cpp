#include "kernels/convert.h"

#include <string>

#include "common/error.h"
#include "kernels/variant.h"

namespace ours {

namespace {

kernels::Element element_of(DType half) {
  if (half == DType::BFloat16) return kernels::Element::BF16;
  if (half == DType::Float16) return kernels::Element::F16;
  throw InvalidArgument(std::string(name_of(half)) + " is not a half type of float32");
}

}  // namespace

void widen(float* dst, const void* src, DType half, size_t count) {
  kernels::variants().back()->widen(element_of(half), reinterpret_cast<char*>(dst), static_cast<const char*>(src),
                                    count);
}

void narrow(void* dst, const float* src, DType half, size_t count) {
  kernels::variants().back()->narrow(element_of(half), static_cast<char*>(dst), reinterpret_cast<const char*>(src),
                                     count);
}

}  // namespace ours
