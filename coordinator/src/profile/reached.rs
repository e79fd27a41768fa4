//! A worker that has answered, before it is measured.

use super::CollectError;
use crate::{
    cluster::DeviceConfig,
    connection::{Connection, introduce},
};
use galaxy_common::DeviceProfile;
use galaxy_proto::{identity::Identity, v1::DescribeReply};

/// A worker that has answered.
#[derive(Clone)]
pub(super) struct Reached {
    pub(super) device: DeviceConfig,
    pub(super) connection: Connection,
    pub(super) description: DescribeReply,
    /// How many threads its kernels will use.
    pub(super) threads: u16,
}

impl Reached {
    /// Whether a profile was measured on this device as it is now.
    pub(super) fn is_of(&self, profile: &DeviceProfile) -> bool {
        profile.device == self.device.name
            && profile.threads == self.threads
            && profile.engine == self.description.engine
    }
}

/// Connects to the worker of `device`, and asks what it is.
///
/// # Errors
/// When it cannot be reached.
pub(super) async fn reach(
    device: &DeviceConfig,
    identity: &Identity,
) -> Result<Reached, CollectError> {
    let failed = |why| CollectError::Unreachable { device: device.name.clone(), why };
    let (connection, description) = introduce(device, identity).await.map_err(failed)?;
    let own = u16::try_from(description.threads).unwrap_or(u16::MAX).max(1);
    let threads = device.threads.map_or(own, |threads| threads.min(own));
    Ok(Reached { device: device.clone(), connection, description, threads })
}
