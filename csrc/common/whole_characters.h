#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace ours {

/// How many bytes of a text in UTF-8 to keep if there is room for `most`, so that it does not end within a character.
/// Python could not read that.
inline size_t whole_characters(std::string_view text, size_t most) {
  size_t length = std::min(text.size(), most);
  while (length > 0 && length < text.size() && (text[length] & 0xC0) == 0x80) --length;
  return length;
}

}  // namespace ours
