//! Reading what requests bring: texts become tokens and files images, where blocking is allowed.

use super::Session;
use crate::{error::RequestError, fleet::blocking};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

impl Session {
    /// Runs `read` where blocking is allowed, and gives how long it took.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Self, &Gone) -> Result<T, RequestError> + Send + 'static,
    ) -> Result<(T, Duration), RequestError> {
        let session = self.clone();
        let (_wanted, gone) = Gone::pair();
        blocking(move || {
            let begun = Instant::now();
            Ok((read(&session, &gone)?, begun.elapsed()))
        })
        .await?
    }
}

/// Tells a thread whether anybody still waits for its result.
pub(super) struct Gone(Weak<()>);

impl Gone {
    /// What the side that waits keeps, and what the side that works asks.
    fn pair() -> (Arc<()>, Self) {
        let kept = Arc::new(());
        let asked = Self(Arc::downgrade(&kept));
        (kept, asked)
    }

    pub(super) fn check(&self) -> Result<(), RequestError> {
        match self.0.strong_count() {
            0 => Err(RequestError::Internal { why: "its client is gone".to_owned() }),
            _ => Ok(()),
        }
    }
}
