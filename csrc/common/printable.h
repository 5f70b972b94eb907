#pragma once

#include <string>

namespace ours {

/// A text of another process without what could end a message early or steer a terminal: each control character but
/// tabs and ends of lines becomes '?'.
inline std::string printable(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < ' ' && c != '\n' && c != '\t') || byte == 0x7f) c = '?';
  }
  return text;
}

}  // namespace ours
