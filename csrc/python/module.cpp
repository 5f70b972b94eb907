#include "python/bind.h"

// torch's build names the module through TORCH_EXTENSION_NAME.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of ourddp.";
  ours::bind_options(module);
  ours::bind_backend(module);
  ours::bind_reducer(module);
}
