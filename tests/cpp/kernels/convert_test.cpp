#include "kernels/convert.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/error.h"
#include "kernels/variant.h"
#include "support/reduce_reference.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

using kernels::Element;
using kernels::Variant;
using kernels::variants;

constexpr int kFractionBits[] = {7, 10};  // bfloat16, float16

Element element_of(int fraction_bits) { return fraction_bits == 7 ? Element::BF16 : Element::F16; }

std::vector<float> narrow_and_widen(const Variant& variant, int fraction_bits, const std::vector<float>& values,
                                    std::vector<uint16_t>& halves) {
  halves.assign(values.size() + 1, 0x1234);
  std::vector<float> back(values.size() + 1, -7.0f);
  const Element half = element_of(fraction_bits);
  variant.narrow(half, reinterpret_cast<char*>(halves.data()), reinterpret_cast<const char*>(values.data()),
                 values.size());
  variant.widen(half, reinterpret_cast<char*>(back.data()), reinterpret_cast<const char*>(halves.data()),
                values.size());
  // Nothing beyond the end is touched.
  CHECK_EQ(halves.back(), 0x1234);
  CHECK_EQ(back.back(), -7.0f);
  halves.pop_back();
  back.pop_back();
  return back;
}

TEST(float32_becomes_the_nearest_half_and_back) {
  std::mt19937 random(7);
  const float limits[] = {0.0f,
                          -0.0f,
                          1.0f,
                          65504.0f,
                          65519.0f,
                          65520.0f,
                          1e-8f,
                          6e-8f,
                          3e38f,
                          3.4e38f,
                          -1e-40f,
                          2.0009766f,
                          1.00048828125f,
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};
  for (const Variant* variant : variants()) {
    for (const int fraction_bits : kFractionBits) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{33}, size_t{5000}}) {
        std::vector<float> values(count);
        for (size_t i = 0; i < count; ++i) {
          const uint32_t bits = static_cast<uint32_t>(random());
          std::memcpy(&values[i], &bits, sizeof(bits));
          if (i < std::size(limits)) values[i] = limits[i];
          if (std::isnan(values[i])) values[i] = 1.0f;
        }
        std::vector<uint16_t> halves;
        const std::vector<float> back = narrow_and_widen(*variant, fraction_bits, values, halves);
        for (size_t i = 0; i < count; ++i) {
          CHECK_EQ(halves[i], encode_16(values[i], fraction_bits));
          CHECK_EQ(back[i], decode_16(halves[i], fraction_bits));
        }
      }
      std::vector<uint16_t> halves;
      CHECK(std::isnan(narrow_and_widen(*variant, fraction_bits, {std::nanf("")}, halves)[0]));
    }
  }
}

TEST(only_half_types_are_converted) {
  float value = 0;
  CHECK_THROWS(InvalidArgument, widen(&value, &value, DType::Float32, 1));
  CHECK_THROWS(InvalidArgument, narrow(&value, &value, DType::Int16, 1));
}

}  // namespace
}  // namespace ours::testing
