#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// The parsers of what comes from the network, from the store, from files and from the environment, for fuzzing. Each
// is a file in parsers/, which registers the parser's name, inputs to start from, and a function that parses any bytes.
// It fails if that function breaks one of the rules that it checks, reads or writes where it must not, as sanitizers
// find out, or throws anything but an Error, which is how a parser refuses its input.

namespace ours::fuzz {

using Bytes = std::string;

/// An input as a peer or a user would write it, from which fuzzing starts.
struct Seed {
  std::string name;  ///< of its file in seeds/<parser>/
  Bytes bytes;
};

struct Parser {
  std::string name;
  std::vector<Seed> (*seeds)();
  void (*parse)(const Bytes& input);

  /// Parses the input, which may be refused.
  void run(const Bytes& input) const;
};

/// In the order of their names.
const std::vector<Parser>& parsers();

struct Registration {
  Registration(const char* name, std::vector<Seed> (*seeds)(), void (*parse)(const Bytes&));
};

/// A rule is broken. Not an Error, which would count as a refusal.
class Finding : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw Finding(rule);
}

/// Takes values from the front of an input. What is missing at its end is zero.
class Source {
 public:
  explicit Source(const Bytes& input) : input_(input) {}

  bool empty() const { return at_ == input_.size(); }
  Bytes take(size_t bytes);
  Bytes rest() { return take(input_.size() - at_); }

  template <class T>
  T value() {
    T value{};
    take_to(&value, sizeof(value));
    return value;
  }
  uint8_t byte() { return value<uint8_t>(); }

 private:
  void take_to(void* to, size_t bytes);

  const Bytes& input_;
  size_t at_ = 0;
};

/// The bytes of a message as they travel.
template <class T>
Bytes bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

}  // namespace ours::fuzz
