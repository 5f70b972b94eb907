#include "reducer/device_streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace ours {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void StreamSet::note(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = current_stream(device);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

bool StreamSet::join(c10::Device device) const {
  if (device.is_cpu()) return false;
  const c10::Stream current = current_stream(device);
  bool others = false;
  for (const c10::Stream& stream : streams_) {
    if (stream.device() != current.device() || stream == current) continue;
    // Because it is only recorded now, the event may be behind more than what was noted. That costs nothing if there
    // is no other stream, whereas an event for every gradient would.
    c10::Event event(device.type());
    event.record(stream);
    event.block(current);
    others = true;
  }
  return others;
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu() || !tensor.has_storage()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

}  // namespace ours
