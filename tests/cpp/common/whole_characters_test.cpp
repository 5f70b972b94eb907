#include "common/whole_characters.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(a_text_is_cut_between_characters) {
  const std::string text = "a\xE6\x95\xB0z";  // the one in the middle takes three bytes
  CHECK_EQ(whole_characters(text, 9), size_t{5});
  CHECK_EQ(whole_characters(text, 5), size_t{5});
  CHECK_EQ(whole_characters(text, 4), size_t{4});
  CHECK_EQ(whole_characters(text, 3), size_t{1});
  CHECK_EQ(whole_characters(text, 2), size_t{1});
  CHECK_EQ(whole_characters(text, 1), size_t{1});
  CHECK_EQ(whole_characters(text, 0), size_t{0});
  CHECK_EQ(whole_characters("\x95\xB0", 1), size_t{0});
}

}  // namespace
}  // namespace ours::testing
