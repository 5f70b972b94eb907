#include "transport/node/node_probe.h"

#include <unistd.h>

#include <cstring>
#include <sstream>

#include "common/error.h"
#include "common/random.h"

namespace ours {

namespace {

struct Number {
  uint64_t words[2];
};

}  // namespace

NodeProbe::NodeProbe() : memory_(SharedMemory::create(sizeof(Number))) {
  const auto number = draw_random<Number>();
  memory_->reserve(0, sizeof(number));
  std::memcpy(memory_->data(), &number, sizeof(number));
}

std::string NodeProbe::address() const {
  Number number;
  std::memcpy(&number, memory_->data(), sizeof(number));
  std::ostringstream out;
  out << ::getpid() << ' ' << memory_->fd() << ' ' << number.words[0] << ' ' << number.words[1];
  return out.str();
}

std::string NodeProbe::obstacle(const std::string& address) {
  std::istringstream in(address);
  pid_t pid = 0;
  int fd = -1;
  Number expected{};
  in >> pid >> fd >> expected.words[0] >> expected.words[1];
  if (!in) return "malformed address '" + address + "'";
  try {
    const auto memory = SharedMemory::open(descriptor_path(pid, fd));
    if (memory->bytes() < sizeof(Number)) return "the memory found there is another";
    return std::memcmp(memory->data(), &expected, sizeof(expected)) == 0 ? "" : "the memory found there is another";
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace ours
