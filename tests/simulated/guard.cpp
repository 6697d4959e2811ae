// A device guard for CUDA that guards nothing, for builds of PyTorch without CUDA: what indexes, copies or
// combines tensors that say "cuda" asks for one, and would be refused.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct SimulatedGuard final : c10::impl::DeviceGuardImplInterface {
    static constexpr DeviceType static_type = DeviceType::CUDA;
    static Device device() { return Device(static_type, 0); }
    static Stream stream() { return Stream(Stream::DEFAULT, device()); }

    DeviceType type() const override { return static_type; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    Device getDevice() const override { return device(); }
    Device exchangeDevice(Device) const override { return device(); }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device) const override { return stream(); }
    Stream getNewStream(Device, int) const override { return stream(); }
    Stream exchangeStream(Stream) const override { return stream(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)

}  // namespace
