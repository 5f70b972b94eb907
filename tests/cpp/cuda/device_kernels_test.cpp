#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "kernels/convert.h"
#include "support/device_contract.h"
#include "support/reduce_reference.h"
#include "support/testing.h"

// The kernels of any device against the CPU's, for every type and operation, at sizes and addresses that do not fit.

namespace ours {
namespace {

using testing::OnDevice;

constexpr size_t kBytes = size_t{1} << 16;
constexpr size_t kBuffers = 9;

template <class F>
void for_each_supported(const F& f) {
  for (int d = 0; d <= static_cast<int>(DType::Opaque8); ++d) {
    for (int k = 0; k <= static_cast<int>(ReduceKind::PremulSum); ++k) {
      const auto dtype = static_cast<DType>(d);
      const auto kind = static_cast<ReduceKind>(k);
      if (is_supported(kind, dtype)) f(dtype, kind);
    }
  }
}

/// Any bits at all in the first buffer, numbers near one in the others.
std::vector<char> fill(std::mt19937& random, DType dtype, size_t count, size_t buffer) {
  std::vector<char> data(count * size_of(dtype));
  for (char& c : data) c = static_cast<char>(random());
  static const std::map<DType, DType> kParts = {{DType::Float16, DType::Float16},   {DType::BFloat16, DType::BFloat16},
                                                {DType::Float32, DType::Float32},   {DType::Float64, DType::Float64},
                                                {DType::Complex32, DType::Float16}, {DType::Complex64, DType::Float32},
                                                {DType::Complex128, DType::Float64}};
  const auto found = kParts.find(dtype);
  if (buffer == 0 || found == kParts.end()) return data;
  const DType part = found->second;
  std::uniform_real_distribution<float> uniform(-2.0F, 2.0F);
  std::vector<float> values(data.size() / size_of(part));
  for (float& x : values) x = uniform(random);
  if (part == DType::Float64) {
    const std::vector<double> doubles(values.begin(), values.end());
    std::memcpy(data.data(), doubles.data(), data.size());
  } else if (part == DType::Float32) {
    std::memcpy(data.data(), values.data(), data.size());
  } else {
    narrow(data.data(), values.data(), part, values.size());
  }
  return data;
}

struct ReduceCase {
  DType dtype;
  Reduction reduction;
  size_t sources, results, count, shift;
  bool in_place;
};

void check_case(OnDevice& on, std::mt19937& random, const ReduceCase& c) {
  const size_t size = size_of(c.dtype), bytes = c.count * size;
  std::vector<std::vector<char>> data;
  std::vector<const char*> host;
  std::vector<const void*> sources;
  std::vector<void*> results;
  for (size_t s = 0; s < c.sources; ++s) {
    data.push_back(fill(random, c.dtype, c.count + 1, s));
    host.push_back(data.back().data());
    // Each source lies at another distance from a multiple of 16 bytes, unless all are to be aligned.
    char* place = on.at(s) + (c.shift == 0 ? 0 : (c.shift + s) % 16 / size * size);
    on.put(place, data.back().data(), bytes);
    sources.push_back(place);
  }
  for (size_t r = 0; r < c.results; ++r) {
    results.push_back(c.in_place ? const_cast<void*>(sources[r]) : on.at(c.sources + r) + c.shift / size * size);
  }
  std::vector<char> expected(bytes + size);
  testing::reference_reduce(expected.data(), host, c.count, c.dtype, c.reduction);
  const std::vector<char> blank(kBytes, 'x');
  for (size_t r = 0; !c.in_place && r < c.results; ++r) on.put(on.at(c.sources + r), blank.data(), kBytes);
  on.device->reduce(results, sources, c.count, c.dtype, c.reduction, on.stream());
  for (size_t r = 0; r < c.results; ++r) {
    char* const buffer = on.at(c.in_place ? r : c.sources + r);
    const std::vector<char> got = on.get(buffer, kBytes);
    const auto begin = got.begin() + (static_cast<char*>(results[r]) - buffer);
    const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
    const auto untouched = [&](auto from, auto to) { return std::all_of(from, to, [](char x) { return x == 'x'; }); };
    const bool bounded = c.in_place || (untouched(got.begin(), begin) && untouched(end, got.end()));
    if (bounded && testing::same_values(&*begin, expected.data(), bytes, c.dtype)) continue;
    testing::fail(__FILE__, __LINE__,
                  std::string(name_of(c.dtype)) + " " + name_of(c.reduction.kind) + ", " + std::to_string(c.sources) +
                      " sources, " + std::to_string(c.count) + " elements, shift " + std::to_string(c.shift));
  }
}

TEST(device_reduce_equals_the_reference_for_every_dtype_and_op) {
  OnDevice on(kBytes, kBuffers);
  std::mt19937 random(1);
  for_each_supported([&](DType dtype, ReduceKind kind) {
    for (size_t count : {0, 1, 7, 64, 1025}) {
      for (size_t shift : {0, 5}) {
        check_case(on, random, {dtype, {kind, 3, 0.3}, 3, 2, count, shift, false});
      }
    }
  });
}

TEST(device_reduce_of_few_and_many_sources) {
  OnDevice on(kBytes, kBuffers);
  std::mt19937 random(2);
  for (DType dtype : {DType::Float32, DType::BFloat16, DType::Int64, DType::Complex32, DType::Bool}) {
    for (size_t sources : {1, 2, 4, 7, 8}) {
      const ReduceKind kind = dtype == DType::Bool ? ReduceKind::Sum : ReduceKind::Avg;
      check_case(on, random, {dtype, {kind, static_cast<int>(sources), 1.0}, sources, 1, 3001, 0, false});
      check_case(on, random, {dtype, {kind, static_cast<int>(sources), 1.0}, sources, sources, 2000, 0, true});
      check_case(on, random, {dtype, {kind, static_cast<int>(sources), 1.0}, sources, sources, 333, 8, true});
      // Of several blocks.
      const size_t most = (kBytes - 16) / size_of(dtype);
      check_case(on, random, {dtype, {kind, static_cast<int>(sources), 1.0}, sources, 1, most, 5, false});
    }
  }
}

TEST(device_reduce_takes_as_many_as_it_says) {
  OnDevice on(kBytes, 1);
  std::vector<const void*> sources;
  std::vector<void*> results;
  std::vector<int32_t> ones(64 * 16, 1);
  on.put(on.at(0), ones.data(), ones.size() * sizeof(int32_t));
  for (int i = 0; i < kMostDeviceRanks; ++i) {
    results.push_back(on.at(0) + i * 64);
    sources.push_back(on.at(0) + i * 64);
  }
  on.device->reduce(results, sources, 16, DType::Int32, {ReduceKind::Sum, 64, 1.0}, on.stream());
  const std::vector<char> got = on.get(on.at(0), 4096);
  for (size_t i = 0; i < 1024; ++i) {
    int32_t x = 0;
    std::memcpy(&x, got.data() + 4 * i, sizeof(x));
    CHECK_EQ(x, 64);
  }
}

}  // namespace
}  // namespace ours
