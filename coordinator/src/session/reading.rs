//! Reading what requests bring: texts become tokens and files images, where blocking is allowed.

use super::Session;
use crate::{error::RequestError, fleet::blocking};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::time::Instant;

impl Session {
    /// Reads what came, where blocking is allowed, and says how long that took.
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

/// Whether anybody waits still for what a thread makes.
pub(super) struct Gone(Weak<()>);

impl Gone {
    /// What is kept by who waits, and what is asked by who works.
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
