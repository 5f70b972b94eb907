#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// From where a place gets the parts of a broadcast, and where it passes them on to. Places count from the root's.
struct BroadcastLinks {
  int parent = -1;  ///< none at the root's place
  std::vector<int> children;
};

/// The places form a chain that begins at the root if the message has as many parts as the chain has links: each place
/// sends a part on while the next one arrives, so that every link carries the message once and all at the same time.
/// Shorter messages go down a binomial tree, which is log2(places) links deep: place v gets them from the place whose
/// number is v without its highest bit.
inline BroadcastLinks broadcast_links(int place, int places, size_t parts) {
  BroadcastLinks links;
  if (parts >= static_cast<size_t>(places)) {
    if (place > 0) links.parent = place - 1;
    if (place + 1 < places) links.children.push_back(place + 1);
    return links;
  }
  int bit = 1;
  for (; bit <= place; bit *= 2) links.parent = place - bit;
  for (; place + bit < places; bit *= 2) links.children.push_back(place + bit);
  return links;
}

}  // namespace ours
