#include "kernels/reduce.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "kernels/variant.h"
#include "support/reduce_reference.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

using kernels::reduce_by;
using kernels::Variant;
using kernels::variants;

constexpr ReduceKind kKinds[] = {ReduceKind::Sum,   ReduceKind::Avg,    ReduceKind::Product,
                                 ReduceKind::Min,   ReduceKind::Max,    ReduceKind::BitAnd,
                                 ReduceKind::BitOr, ReduceKind::BitXor, ReduceKind::PremulSum};
constexpr size_t kGuard = 64;

template <class F>
void for_each_supported(const F& f) {
  for (int d = 0; d <= static_cast<int>(DType::Opaque8); ++d) {
    for (ReduceKind kind : kKinds) {
      if (is_supported(kind, static_cast<DType>(d))) f(static_cast<DType>(d), kind);
    }
  }
}

std::string describe(DType dtype, const Reduction& reduction, size_t sources, size_t count) {
  return std::string(name_of(dtype)) + " " + name_of(reduction.kind) + ", " + std::to_string(sources) + " sources, " +
         std::to_string(count) + " elements";
}

/// Sources at random alignments (of bytes, not elements), and a destination between guards.
class Case {
 public:
  Case(std::mt19937& random, DType dtype, size_t sources, size_t count) : count_(count), dtype_(dtype) {
    bytes_ = count * size_of(dtype);
    for (size_t s = 0; s < sources; ++s) {
      const size_t offset = random() % 65;
      std::vector<char> buffer(bytes_ + offset);
      fill(random, buffer.data() + offset, s);
      buffers_.push_back(std::move(buffer));
      srcs_.push_back(buffers_.back().data() + offset);
    }
    dst_offset_ = kGuard + random() % 65;
    out_.assign(bytes_ + dst_offset_ + kGuard, '\x5a');
  }

  char* dst() { return out_.data() + dst_offset_; }
  const std::vector<const char*>& srcs() const { return srcs_; }
  char* src(size_t s) { return const_cast<char*>(srcs_[s]); }
  size_t count() const { return count_; }
  size_t bytes() const { return bytes_; }

  void run(const Variant& variant, const Reduction& reduction, bool stream, char* to, size_t begin, size_t end) {
    const size_t size = size_of(dtype_);
    std::vector<const void*> at;
    for (const char* src : srcs_) at.push_back(src + begin * size);
    reduce_by(variant, to + begin * size, at.data(), static_cast<int>(at.size()), end - begin, dtype_, reduction,
              stream);
  }
  void run(const Variant& variant, const Reduction& reduction, bool stream) {
    run(variant, reduction, stream, dst(), 0, count_);
  }

  std::vector<char> expected(const Reduction& reduction) const {
    std::vector<char> result(bytes_ + 1);  // data() is never null
    reference_reduce(result.data(), srcs_, count_, dtype_, reduction);
    return result;
  }

  bool guards_intact() const {
    const auto intact = [](char c) { return c == '\x5a'; };
    return std::all_of(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(dst_offset_), intact) &&
           std::all_of(out_.end() - static_cast<std::ptrdiff_t>(kGuard), out_.end(), intact);
  }

 private:
  /// Any bits at all in the first source, NaNs and infinities among them; elsewhere numbers near one.
  void fill(std::mt19937& random, char* p, size_t source) const {
    for (size_t i = 0; i < bytes_; ++i) p[i] = static_cast<char>(random());
    if (source == 0) return;
    std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
    const auto put = [&](auto encode) {
      using T = decltype(encode(0.0f));
      for (size_t at = 0; at + sizeof(T) <= bytes_; at += sizeof(T)) {
        const T x = encode(uniform(random));
        std::memcpy(p + at, &x, sizeof(T));
      }
    };
    switch (dtype_) {
      case DType::Float16:
      case DType::Complex32:
        return put([](float x) { return encode_16(x, 10); });
      case DType::BFloat16:
        return put([](float x) { return encode_16(x, 7); });
      case DType::Float32:
      case DType::Complex64:
        return put([](float x) { return x; });
      case DType::Float64:
      case DType::Complex128:
        return put([](float x) { return x * 1.000000001; });
      default:
        return;
    }
  }

  size_t count_, bytes_ = 0, dst_offset_ = 0;
  DType dtype_;
  std::vector<std::vector<char>> buffers_;
  std::vector<const char*> srcs_;
  std::vector<char> out_;
};

TEST(reduce_equals_the_reference_for_every_dtype_op_and_variant) {
  std::mt19937 random(1);
  for_each_supported([&](DType dtype, ReduceKind kind) {
    for (size_t sources = 1; sources <= 9; ++sources) {
      for (size_t count : {0, 1, 7, 8, 255, 1023, 1024, 1025}) {
        const Reduction reduction{kind, static_cast<int>(sources), 0.3};
        Case c(random, dtype, sources, count);
        const auto expected = c.expected(reduction);
        for (const Variant* variant : variants()) {
          for (bool stream : {false, true}) {
            std::memset(c.dst(), 0x33, c.bytes());
            c.run(*variant, reduction, stream);
            if (!same_values(c.dst(), expected.data(), c.bytes(), dtype) || !c.guards_intact()) {
              fail(__FILE__, __LINE__, describe(dtype, reduction, sources, count) + ", " + variant->name);
            }
          }
        }
      }
    }
  });
}

TEST(reduce_in_place_of_any_source) {
  std::mt19937 random(2);
  for_each_supported([&](DType dtype, ReduceKind kind) {
    for (const Variant* variant : variants()) {
      for (size_t target = 0; target < 3; ++target) {
        const Reduction reduction{kind, 3, -1.5};
        Case c(random, dtype, 3, 777);
        const auto expected = c.expected(reduction);
        c.run(*variant, reduction, target == 1, c.src(target), 0, c.count());
        if (!same_values(c.src(target), expected.data(), c.bytes(), dtype)) {
          fail(__FILE__, __LINE__, describe(dtype, reduction, 3, 777) + ", " + variant->name);
        }
      }
    }
  });
}

// How a tensor is cut into slices, chunks and buckets must not show in the result: not even one bit.
TEST(reduce_of_pieces_equals_reduce_of_the_whole) {
  std::mt19937 random(3);
  for_each_supported([&](DType dtype, ReduceKind kind) {
    const Reduction reduction{kind, 4, 0.7};
    Case c(random, dtype, 4, 2000);
    for (const Variant* variant : variants()) {
      c.run(*variant, reduction, false);
      const std::vector<char> whole(c.dst(), c.dst() + c.bytes());
      std::memset(c.dst(), 0x33, c.bytes());
      for (size_t begin = 0; begin < c.count();) {
        const size_t end = std::min<size_t>(c.count(), begin + 1 + random() % 300);
        c.run(*variant, reduction, random() % 2 == 0, c.dst(), begin, end);
        begin = end;
      }
      if (std::memcmp(whole.data(), c.dst(), c.bytes()) != 0) {
        fail(__FILE__, __LINE__, describe(dtype, reduction, 4, 2000) + ", " + variant->name);
      }
    }
  });
}

template <class T>
T reduce_two(const Variant& variant, DType dtype, ReduceKind kind, T a, T b) {
  const void* srcs[] = {&a, &b};
  T out;
  reduce_by(variant, &out, srcs, 2, 1, dtype, {kind, 2, 1.0}, false);
  return out;
}

TEST(reduce_propagates_nan_from_either_side) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Variant* variant : variants()) {
    for (ReduceKind kind : {ReduceKind::Sum, ReduceKind::Product, ReduceKind::Min, ReduceKind::Max, ReduceKind::Avg}) {
      CHECK(std::isnan(reduce_two(*variant, DType::Float32, kind, nan, 1.0f)));
      CHECK(std::isnan(reduce_two(*variant, DType::Float32, kind, 1.0f, nan)));
      CHECK(std::isnan(reduce_two<double>(*variant, DType::Float64, kind, 1.0, nan)));
      for (uint16_t half_nan : {0x7c01, 0x7e00, 0xfe00, 0x7fff}) {
        const auto out = reduce_two<uint16_t>(*variant, DType::Float16, kind, half_nan, 0x3c00);
        CHECK(std::isnan(decode_16(out, 10)));
      }
      for (uint16_t brain_nan : {0x7f81, 0x7fc0, 0xffff}) {
        const auto out = reduce_two<uint16_t>(*variant, DType::BFloat16, kind, 0x3f80, brain_nan);
        CHECK(std::isnan(decode_16(out, 7)));
      }
    }
  }
}

TEST(reduce_overflows_as_documented) {
  for (const Variant* variant : variants()) {
    CHECK_EQ(reduce_two<uint8_t>(*variant, DType::UInt8, ReduceKind::Sum, 200, 100), 44);
    CHECK_EQ(reduce_two<int8_t>(*variant, DType::Int8, ReduceKind::Sum, 127, 1), -128);
    CHECK_EQ(reduce_two<int32_t>(*variant, DType::Int32, ReduceKind::Product, 1 << 30, 4), 0);
    CHECK_EQ(reduce_two<int64_t>(*variant, DType::Int64, ReduceKind::Sum, INT64_MAX, 1), INT64_MIN);
    CHECK_EQ(reduce_two<int32_t>(*variant, DType::Int32, ReduceKind::Avg, -2, -1), -1);  // towards zero
    CHECK_EQ(reduce_two<uint64_t>(*variant, DType::UInt64, ReduceKind::Max, UINT64_MAX, 1), UINT64_MAX);
    CHECK_EQ(reduce_two<uint8_t>(*variant, DType::Bool, ReduceKind::Sum, 1, 1), 1);
    CHECK_EQ(reduce_two<uint8_t>(*variant, DType::Bool, ReduceKind::Sum, 0, 7), 1);
    // 65504 + 65504 exceeds float16, but its average does not: the sum is held in float32.
    CHECK_EQ(reduce_two<uint16_t>(*variant, DType::Float16, ReduceKind::Sum, 0x7bff, 0x7bff), 0x7c00);
    CHECK_EQ(reduce_two<uint16_t>(*variant, DType::Float16, ReduceKind::Avg, 0x7bff, 0x7bff), 0x7bff);
  }
}

TEST(reduce_keeps_every_half_and_rounds_sums_once) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    const int fraction_bits = dtype == DType::Float16 ? 10 : 7;
    for (const Variant* variant : variants()) {
      std::vector<uint16_t> out(all.size());
      const void* srcs[] = {all.data()};
      reduce_by(*variant, out.data(), srcs, 1, all.size(), dtype, {ReduceKind::Sum, 1, 1.0}, false);
      for (size_t i = 0; i < all.size(); ++i) {
        if (!std::isnan(decode_16(all[i], fraction_bits))) CHECK_EQ(out[i], all[i]);
      }
      // 1 + 2^-11 + 2^-11 (or 2^-8) is a tie twice when rounded after each addition, but representable when summed in
      // float32.
      const uint16_t one = encode_16(1.0f, fraction_bits);
      const uint16_t half_ulp = encode_16(std::ldexp(1.0f, -fraction_bits - 1), fraction_bits);
      const void* three[] = {&one, &half_ulp, &half_ulp};
      uint16_t sum = 0;
      reduce_by(*variant, &sum, three, 3, 1, dtype, {ReduceKind::Sum, 3, 1.0}, false);
      CHECK_EQ(sum, one + 1);
    }
  }
}

TEST(reduce_refuses_what_has_no_meaning) {
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, check_supported(ReduceKind::BitAnd, DType::Float32)),
                 "BAND is not defined for dtype float32: use one of SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, check_supported(ReduceKind::Max, DType::Complex64)),
                 "use one of SUM, AVG, PRODUCT, PREMUL_SUM");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, check_supported(ReduceKind::Sum, DType::Float8E5M2)), "convert to");
  CHECK(!is_supported(ReduceKind::None, DType::Float32));
  CHECK(!is_supported(ReduceKind::Avg, DType::Bool));
  CHECK(is_supported(ReduceKind::Avg, DType::Int16));
  CHECK(!is_supported(ReduceKind::PremulSum, DType::Int32));
  float x = 1;
  const void* srcs[] = {&x};
  CHECK_THROWS(InvalidArgument, reduce(&x, srcs, 0, 1, DType::Float32, {}));
  CHECK_THROWS(InvalidArgument, reduce(&x, srcs, 1, 1, DType::Float32, {ReduceKind::Avg, 0, 1.0}));
  CHECK_THROWS(InvalidArgument, reduce(&x, srcs, 1, 1, DType::Opaque8, {}));
}

TEST(copy_stream_copies_every_length_and_nothing_else) {
  std::mt19937 random(4);
  for (const Variant* variant : variants()) {
    for (size_t bytes : {0, 1, 31, 64, 255, 256, 257, 319, 320, 1000, 4096, 5001}) {
      for (int round = 0; round < 8; ++round) {
        const size_t from = random() % 65, to = kGuard + random() % 65;
        std::vector<char> src(bytes + from + 1), dst(bytes + to + kGuard, '\x5a');
        for (char& c : src) c = static_cast<char>(random());
        variant->copy_stream(dst.data() + to, src.data() + from, bytes);
        CHECK(std::equal(src.begin() + static_cast<std::ptrdiff_t>(from), src.end() - 1,
                         dst.begin() + static_cast<std::ptrdiff_t>(to)));
        const auto untouched = std::count(dst.begin(), dst.begin() + static_cast<std::ptrdiff_t>(to), '\x5a');
        CHECK_EQ(static_cast<size_t>(untouched), to);
        CHECK(std::all_of(dst.end() - kGuard, dst.end(), [](char c) { return c == '\x5a'; }));
      }
    }
  }
}

}  // namespace
}  // namespace ours::testing
