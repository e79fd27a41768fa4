//! The devices of burn that this build has.

use crate::compute::choice::{BurnDevice, EngineChoice, EngineError};
use burn::{Device, Tensor};
use std::panic::catch_unwind;

/// Finds a device and computes something on it, since burn looks for it no earlier.
///
/// # Errors
/// When it was not compiled in, is not there or does not work.
pub(super) fn open(wanted: BurnDevice) -> Result<Device, EngineError> {
    let engine = EngineChoice::Burn(wanted).built()?;
    let failed = |why| EngineError::Device { engine, why };
    let opened = catch_unwind(|| {
        let device = make(wanted)?;
        let one = Tensor::<1>::ones([1], &device).try_into_data();
        Some(one.map(|_| device).map_err(|error| format!("{error:?}")))
    });
    match opened {
        Ok(Some(opened)) => opened.map_err(failed),
        Ok(None) => Err(failed("it was not compiled in".to_owned())),
        // That is how burn says that there is none.
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(failed(text.unwrap_or("burn gave up on it").to_owned()))
        }
    }
}

fn make(wanted: BurnDevice) -> Option<Device> {
    match wanted {
        #[cfg(feature = "burn-flex")]
        BurnDevice::Flex => Some(Device::flex()),
        #[cfg(feature = "burn-wgpu")]
        BurnDevice::Wgpu(index) => Some(Device::wgpu(match index {
            Some(index) => burn::DeviceKind::DiscreteGpu(index.into()),
            None => burn::DeviceKind::DefaultDevice,
        })),
        #[cfg(feature = "burn-cuda")]
        BurnDevice::Cuda(index) => Some(Device::cuda(usize::from(index))),
        #[allow(unreachable_patterns)]
        _ => None,
    }
}
