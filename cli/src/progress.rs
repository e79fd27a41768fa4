//! A spinner on the terminal while something takes longer than a second.

use indicatif::{ProgressBar, ProgressStyle};
use std::{future::Future, io::IsTerminal, pin::pin, time::Duration};

/// How long nothing is shown: most commands are over by then.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits for `work`; after a second shows `what` beside a spinner on stderr, where that is a
/// terminal.
pub async fn watch<T>(what: &'static str, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    if let Ok(done) = tokio::time::timeout(PATIENCE, work.as_mut()).await {
        return done;
    }
    if !std::io::stderr().is_terminal() {
        return work.await;
    }
    let bar = ProgressBar::new_spinner().with_message(what).with_elapsed(PATIENCE);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    let done = work.await;
    bar.finish_and_clear();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn watched_work_returns_its_result() {
        assert_eq!(watch("working", async { 7 }).await, 7);
    }
}
