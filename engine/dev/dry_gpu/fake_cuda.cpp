// Registers a CUDA device without a driver, so that torch built for CPUs dispatches "cuda" tensors.
//
// Python patches cannot replace these two registrations: autograd, streams of the process group and `tensor.to` ask
// C++ for the guard of the device type, and the hooks answer whether CUDA exists.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct FakeCUDAHooks : at::CUDAHooksInterface {
  explicit FakeCUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return Guard::getDeviceIndex(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCUDAHooks)
}
