//! A load of products on kernel threads for as long as it is wanted, beside which links are measured.

use crate::{
    compute::kernels::{
        area::{Area, AreaMut, Extent},
        dense::{self, Epilogue},
        threads::Threads,
    },
    weights::ShardMatrix,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

/// Rows of the product, and width of what it reads and gives: a tenth of a millisecond or less on a
/// fast core, so that parts of a product hardly count.
const ROWS: usize = 16;
const WIDTH: usize = 256;

/// A loop of one product on kernel threads, from its start until it is dropped.
pub struct Load {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A moment of a [`Load`].
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    at: Instant,
    done: u64,
}

/// The work of a [`Load`] between two moments.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    /// The time between the moments, in nanoseconds.
    pub nanos: f64,
    /// The number of products.
    pub products: f64,
}

impl Span {
    /// The rate, in products per nanosecond.
    pub fn speed(&self) -> f64 {
        self.products / self.nanos
    }
}

impl Load {
    /// Starts a load with so many kernel threads.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(threads: u16) -> io::Result<Self> {
        let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (done.clone(), stop.clone());
        let body = move || {
            let threads = Threads::new(threads);
            let scratch = dense::Scratch::new(&threads);
            let matrix = ShardMatrix::even(WIDTH, WIDTH, 0.01);
            let left = vec![0.5; ROWS * WIDTH];
            let mut out = vec![0.0; ROWS * WIDTH];
            let extent = Extent { start: 0, rows: ROWS, columns: WIDTH, stride: WIDTH };
            while !end.load(Ordering::Relaxed) {
                if let (Some(left), Some(out)) =
                    (Area::new(&left, extent), AreaMut::new(&mut out, extent))
                {
                    dense::product(&threads, &scratch, left, &matrix, out, Epilogue::default());
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name("compute load".to_owned()).spawn(body)?;
        Ok(Self { done, stop, thread: Some(thread) })
    }

    /// The present moment.
    pub fn now(&self) -> Moment {
        Moment { at: Instant::now(), done: self.done.load(Ordering::Relaxed) }
    }

    /// The work of the load since a moment.
    pub fn since(&self, moment: Moment) -> Span {
        let now = self.now();
        Span {
            nanos: now.at.duration_since(moment.at).as_nanos() as f64,
            products: now.done.saturating_sub(moment.done) as f64,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked does nothing any more, which is what is wanted.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn background_load_counts_products_until_dropped() {
        let load = Load::start(2).unwrap();
        let begin = load.now();
        while load.since(begin).products < 3.0 {
            std::thread::yield_now();
        }
        let span = load.since(begin);
        assert!(span.nanos > 0.0 && span.products >= 3.0);
        let done = load.done.clone();
        drop(load);
        let last = done.load(Ordering::Relaxed);
        assert_eq!(done.load(Ordering::Relaxed), last);
    }
}
