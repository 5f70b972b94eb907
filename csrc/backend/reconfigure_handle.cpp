#include "backend/reconfigure_handle.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iomanip>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

namespace ours {

namespace {

const char* const kPrefix = "ours:";
const char* const kNew = "new";      // has not had ranks
const char* const kFirst = "first";  // has the ranks that it was made with

}  // namespace

std::string ReconfigureHandle::random_id() {
  std::random_device device;
  std::ostringstream id;
  id << std::hex << std::setfill('0');
  for (int word = 0; word < 4; ++word) id << std::setw(8) << device();
  return id.str();
}

std::string ReconfigureHandle::text() const {
  const std::string state = uuid ? std::to_string(*uuid) : joined ? kFirst : kNew;
  return kPrefix + std::to_string(rank) + ':' + state + ':' + id;
}

ReconfigureHandle ReconfigureHandle::parse(const std::string& text) {
  static const std::regex kForm("ours:([0-9]{1,9}):(new|first|-?[0-9]{1,19}):([0-9a-f]{32})");
  std::smatch found;
  TORCH_CHECK_VALUE(std::regex_match(text, found, kForm), "'", text.substr(0, 80),
                    "' is no handle of the backend ours; pass what get_reconfigure_handle() returns on each rank");
  ReconfigureHandle handle;
  handle.rank = std::stoi(found[1]);
  handle.joined = found[2] != kNew;
  if (handle.joined && found[2] != kFirst) handle.uuid = static_cast<int64_t>(std::stoull(found[2]));
  handle.id = found[3];
  return handle;
}

std::vector<ReconfigureHandle> in_order(std::vector<ReconfigureHandle> handles) {
  std::sort(handles.begin(), handles.end(), [](const ReconfigureHandle& a, const ReconfigureHandle& b) {
    const auto key = [](const ReconfigureHandle& handle) {
      return std::make_tuple(!handle.joined, handle.uuid, handle.rank, handle.id);
    };
    return key(a) < key(b);
  });
  return handles;
}

void check_members(const std::vector<ReconfigureHandle>& handles) {
  TORCH_CHECK_VALUE(!handles.empty(), "reconfigure: there are no handles; pass one for each rank");
  std::set<std::string> ids;
  for (const ReconfigureHandle& handle : handles) {
    TORCH_CHECK_VALUE(ids.insert(handle.id).second, "reconfigure: the handle ", handle.text(),
                      " is there twice, or in an old and a new form; pass the present handle of each rank once");
  }
}

}  // namespace ours
