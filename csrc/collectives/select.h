#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ours {

/// Ways to combine the data of nodes, or of the ranks of a node. Each is explained where it is implemented.
enum class Algorithm : uint8_t {
  Whole,     ///< every rank gets everything
  Doubling,  ///< pairs exchange everything, log2(nodes) times
  Direct,    ///< every rank reduces a slice of everything, sent to it and from it directly
  Ring,      ///< the same, by neighbours
  Last = Ring
};
const char* name_of(Algorithm algorithm);

/// The operations that have a choice; ReduceScatter and AllGather only in a TcpGroup.
/// NodeReduce is all_reduce and reduce among the ranks of one node.
enum class Selectable : uint8_t { AllReduce, Reduce, ReduceScatter, AllGather, NodeReduce, Last = NodeReduce };
const char* name_of(Selectable operation);
/// Throws InvalidArgument that lists the names.
Selectable selectable_of(const std::string& name);

/// The properties of a call on which the choice depends. The same on all ranks of the call.
struct SelectionCase {
  Selectable operation;
  int nodes;     ///< over which the ranks are spread
  int local;     ///< ranks of the node that has most
  size_t bytes;  ///< size of a rank's array; has no meaning for AllGather
};

/// The table by which algorithms are chosen: the rules of a user, followed by the built-in ones. The first rule that
/// applies decides; a rule whose algorithm the operation does not have does not apply.
///
///   all_reduce nodes>=8 bytes<=64K doubling   # one rule a line, or between semicolons
///
/// A rule has an operation, or `all` for those that go between nodes; conditions (nodes, local, bytes, sent, read
/// with <=, >= or =; suffixes K, M, G); and the algorithm. `sent` is bytes times (nodes - 1) and `read` bytes times
/// local: what a rank sends to other nodes, and reads in its own, if every rank sends everything to every other.
class Selection {
 public:
  /// The most bytes of rules without comments: they are published in the store.
  static constexpr size_t kMaxRules = 4096;

  /// Throws InvalidArgument that names the line and what is accepted.
  static Selection parse(const std::string& rules);

  Algorithm choose(const SelectionCase& call) const;

  /// The choices of choose() for calls that differ only in their size, precomputed because a look into the table
  /// takes too long.
  class BySize {
   public:
    Algorithm choose(size_t bytes) const {
      size_t i = 0;
      while (bytes > steps_[i].most) ++i;
      return steps_[i].algorithm;
    }

   private:
    friend class Selection;
    struct Step {
      size_t most;  ///< bytes; of the last one, all that there are
      Algorithm algorithm;
    };
    std::vector<Step> steps_;
  };
  BySize by_size(Selectable operation, int nodes, int local) const;

  /// The user's rules in their shortest form, which parse() accepts.
  std::string rules() const;
  /// The whole table for people, which parse() accepts as well: one rule a line, with its purpose.
  std::string table() const;

 private:
  enum Key : uint8_t { kNodes, kLocal, kBytes, kSent, kRead, kKeys };
  struct Range {
    uint64_t least = 0;
    uint64_t most = UINT64_MAX;
  };
  struct Rule {
    std::optional<Selectable> operation;  ///< none: all
    std::array<Range, kKeys> ranges;
    Algorithm algorithm = Algorithm::Direct;
    std::string comment;

    bool applies(const SelectionCase& call) const;
    bool has_sizes() const;
    std::string text() const;
  };

  static std::vector<Rule> parse_rules(const std::string& text);
  static Rule parse_rule(const std::string& text);
  static void parse_condition(const std::string& word, Rule& rule);

  std::vector<Rule> rules_;
  size_t own_ = 0;  ///< how many of them are the user's; the built-in ones follow
};

/// The rules that OURS_SELECT gives: its text, or, if it has a slash, the content of the file of that name. Throws
/// InvalidArgument if the file cannot be read or the rules are not understood.
Selection selection_from(const std::string& option);

}  // namespace ours
