#include "support/device_contract.h"
#include "support/stand_in_device.h"

namespace ours::testing {

namespace {

std::shared_ptr<StandInDevice> stand_in() {
  static const std::shared_ptr<StandInDevice> device = StandInDevice::make();
  return device;
}

class Stop : public Obstacle {
 public:
  explicit Stop(StreamHandle stream) : stopped_(stand_in()->stop(stream)) {}
  void remove() override { stopped_->go_on(); }

 private:
  const std::unique_ptr<StoppedStream> stopped_;
};

}  // namespace

std::shared_ptr<Device> contract_device() { return stand_in(); }

std::unique_ptr<Obstacle> put_obstacle(StreamHandle stream) { return std::make_unique<Stop>(stream); }

}  // namespace ours::testing
