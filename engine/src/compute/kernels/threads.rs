//! The kernel threads of one engine: exactly as many as the device grants.
//!
//! A product of one row takes some tens of microseconds, which is what it takes to wake a thread
//! that sleeps. So the calling thread is one of the kernel threads and starts at once; the others
//! look for work for a moment before they sleep, and who comes too late is not waited for.
#![allow(unsafe_code)]

use super::area::Cut;
use std::{
    cell::Cell,
    hint,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Below this many values an operation is done before another thread has woken up.
const WORTH_SHARING: usize = 1 << 14;
/// The most pieces that work is cut into.
const MOST_PIECES: usize = 64;
/// How often a thread looks before it sleeps or yields: some 20 to 80 microseconds.
const LOOKS: u32 = 1000;

/// Threads that share the work of an operation. The calling thread works too, so there are never
/// more busy kernel threads than granted.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    /// Whether a round is under way: one at a time.
    busy: AtomicBool,
    workers: Vec<JoinHandle<()>>,
}

/// Work that is shared: `run(piece)` for every piece.
#[derive(Clone, Copy)]
struct Job {
    /// The work. Its lifetime is erased: it lives until its round is over, see [`Threads::run`].
    run: *const (dyn Fn(usize) + Sync),
    pieces: usize,
}

// SAFETY: what it points to is `Sync`, and used only while it is borrowed by `Threads::run`.
unsafe impl Send for Job {}

struct Shared {
    /// The number of the round in the upper half, then [`OPEN`], then how many workers are in the
    /// round.
    state: AtomicU64,
    job: Mutex<Option<Job>>,
    /// The next piece to be taken.
    next: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Workers that sleep, or are about to.
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
}

/// The bit that says that workers may still join the round.
const OPEN: u64 = 1 << 31;
const ROUND: u64 = 1 << 32;

fn round(state: u64) -> u64 {
    state / ROUND
}
fn inside(state: u64) -> u64 {
    state % OPEN
}

thread_local! {
    /// The place of a kernel thread; 0 for a thread that calls.
    static INDEX: Cell<usize> = const { Cell::new(0) };
}

impl Threads {
    /// `count` threads with the calling one; fewer where the system gives no more.
    pub(crate) fn new(count: u16) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: Mutex::new(None),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let start = |index: usize| {
            let shared = shared.clone();
            let name = format!("galaxy-kernel-{index}");
            thread::Builder::new().name(name).spawn(move || {
                INDEX.set(index);
                shared.work();
            })
        };
        let mut workers = Vec::new();
        for index in 1..usize::from(count).max(1) {
            match start(index) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    tracing::warn!(%error, count, "no more kernel threads: {index} have to do");
                    break;
                }
            }
        }
        Self { shared, busy: AtomicBool::new(false), workers }
    }

    pub(crate) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// The place of the calling kernel thread, below [`Threads::count`].
    pub(crate) fn index(&self) -> usize {
        INDEX.get().min(self.workers.len())
    }

    /// Runs `run(0)` to `run(pieces - 1)`, each once, on all threads, and waits.
    ///
    /// # Panics
    /// When one of them does.
    pub(crate) fn run(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || pieces <= 1 || self.busy.swap(true, Ordering::Acquire) {
            return (0..pieces).for_each(run);
        }
        // SAFETY: only the lifetime is erased. `End` below is dropped before this function returns
        // or unwinds, and waits until no worker is in the round; a worker reads the job only after
        // it has joined the round, which it cannot once the round is closed.
        let erased = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(run)
        };
        let shared = &*self.shared;
        *shared.job.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Job { run: erased, pieces });
        shared.next.store(0, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let number = round(shared.state.load(Ordering::Relaxed)).wrapping_add(1);
        shared.state.store((number << 32) | OPEN, Ordering::SeqCst);
        let end = End(self);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        shared.take(pieces, run);
        drop(end);
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a kernel thread panicked");
        }
    }

    /// Cuts `whole` into pieces of at least `grain` items and runs `work` on all of them, each with
    /// the index of its first item. `values` says how much work it is, in values touched.
    pub(crate) fn each<T: Cut>(
        &self,
        whole: T,
        grain: usize,
        values: usize,
        work: impl Fn(usize, T) + Sync,
    ) {
        let items = whole.items();
        let most = (self.count() * 2).min(MOST_PIECES);
        let grain = grain.max(items.div_ceil(most)).max(1);
        if self.count() == 1 || values < WORTH_SHARING || items <= grain {
            return work(0, whole);
        }
        let mut pieces = [const { None }; MOST_PIECES];
        let (mut rest, mut count) = (whole, 0);
        while rest.items() > grain {
            let (piece, more) = rest.cut(grain);
            pieces[count] = Some(piece);
            (rest, count) = (more, count + 1);
        }
        pieces[count] = Some(rest);
        self.hand_out(pieces, count + 1, |at, piece| work(at * grain, piece));
    }

    /// Cuts `whole` in two with `halve`, and what that gives again, until it will not or there are
    /// enough pieces, and runs `work` on all of them.
    pub(crate) fn split<T: Send>(
        &self,
        whole: T,
        halve: impl Fn(T) -> Result<(T, T), T>,
        work: impl Fn(T) + Sync,
    ) {
        let mut pieces = [const { None }; MOST_PIECES];
        pieces[0] = Some(whole);
        let (mut count, mut at) = (1, 0);
        // Once around without a cut is enough.
        let mut uncut = 0;
        while count < MOST_PIECES && uncut < count {
            match pieces[at].take().map(&halve) {
                Some(Ok((head, tail))) => {
                    (pieces[at], pieces[count]) = (Some(head), Some(tail));
                    (count, uncut) = (count + 1, 0);
                }
                Some(Err(piece)) => {
                    pieces[at] = Some(piece);
                    uncut += 1;
                }
                None => {}
            }
            at = (at + 1) % count;
        }
        self.hand_out(pieces, count, |_, piece| work(piece));
    }

    /// Runs `work` on the first `count` pieces, each with its place.
    fn hand_out<T: Send>(
        &self,
        pieces: [Option<T>; MOST_PIECES],
        count: usize,
        work: impl Fn(usize, T) + Sync,
    ) {
        let pieces = pieces.map(Mutex::new);
        self.run(count, &|at| {
            let own = pieces[at].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(own) = own {
                work(at, own);
            }
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.asleep.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches what its work panics with.
            let _ = worker.join();
        }
    }
}

/// Ends a round, also when the caller's own work panics.
struct End<'a>(&'a Threads);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let shared = &*self.0.shared;
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0;
        while inside(shared.state.load(Ordering::Acquire)) > 0 {
            looks += 1;
            if looks < LOOKS { hint::spin_loop() } else { thread::yield_now() }
        }
        self.0.busy.store(false, Ordering::Release);
    }
}

/// Makes a worker leave a round, whatever happens to it.
struct Leave<'a>(&'a AtomicU64);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Shared {
    /// Takes pieces until there are none.
    fn take(&self, pieces: usize, run: &(dyn Fn(usize) + Sync)) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            run(piece);
        }
    }

    /// The loop of a worker: it joins one round after another, until the threads are to end.
    fn work(&self) {
        let mut seen = 0;
        while let Some(state) = self.await_round(seen) {
            seen = round(state);
            if !self.join(seen) {
                continue;
            }
            let _left = Leave(&self.state);
            let job = *self.job.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(job) = job {
                // SAFETY: this worker is in the round (`join`), so `Threads::run` still borrows it.
                let run = unsafe { &*job.run };
                let result = panic::catch_unwind(AssertUnwindSafe(|| self.take(job.pieces, run)));
                if result.is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Enters round `number`, if it is still open.
    fn join(&self, number: u64) -> bool {
        let enter = |state| (round(state) == number && state & OPEN > 0).then_some(state + 1);
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }

    /// Waits for an open round after `seen`; none when the threads are to end.
    fn await_round(&self, seen: u64) -> Option<u64> {
        let look = || {
            let state = self.state.load(Ordering::SeqCst);
            (round(state) != seen && state & OPEN > 0).then_some(state)
        };
        for _ in 0..LOOKS {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(state) = look() {
                return Some(state);
            }
            hint::spin_loop();
        }
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            // Whoever opens a round after this look sees the sleeper, and wakes it.
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(state) = look() {
                break Some(state);
            }
            asleep = self.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once_and_never_two_on_one_thread_index() {
        let (repeats, many) = if cfg!(miri) { (20, 3) } else { (2000, 1000) };
        for count in [1, 2, 3, 5] {
            let threads = Threads::new(count);
            let at_once: Vec<AtomicBool> =
                (0..threads.count()).map(|_| AtomicBool::new(false)).collect();
            let pieces = (0..40).chain([64, many]).chain(std::iter::repeat_n(7, repeats));
            for pieces in pieces {
                let runs: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                threads.run(pieces, &|piece| {
                    let place = &at_once[threads.index()];
                    assert!(!place.swap(true, Ordering::AcqRel), "two threads in one place");
                    runs[piece].fetch_add(1, Ordering::Relaxed);
                    place.store(false, Ordering::Release);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn pieces_of_a_cut_slice_cover_every_item_once() {
        let threads = Threads::new(3);
        for (items, grain) in [(1, 1), (5, 1), (100, 7), (64, 64), (1000, 3)] {
            let mut values = vec![0.0_f32; items];
            threads.each(values.as_mut_slice(), grain, usize::MAX, |first, piece| {
                for (at, value) in piece.iter_mut().enumerate() {
                    *value += (first + at) as f32 + 1.0;
                }
            });
            assert!(values.iter().enumerate().all(|(at, value)| *value == at as f32 + 1.0));
        }
    }

    #[test]
    fn halved_ranges_cover_every_item_once() {
        let threads = Threads::new(3);
        for (items, least) in [(1, 1), (2, 1), (63, 1), (64, 1), (100, 1), (1000, 7), (5, 9)] {
            let sum = AtomicUsize::new(0);
            let halve = |span: std::ops::Range<usize>| match span.len() / 2 {
                half if half >= least => {
                    let middle = span.start + half;
                    Ok((span.start..middle, middle..span.end))
                }
                _ => Err(span),
            };
            threads.split(0..items, halve, |span| {
                sum.fetch_add(span.sum::<usize>(), Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), (0..items).sum::<usize>());
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_go_on() {
        let threads = Threads::new(3);
        for bad in 0..6 {
            let run = || threads.run(6, &|piece| assert_ne!(piece, bad));
            assert!(panic::catch_unwind(AssertUnwindSafe(run)).is_err());
            let done = AtomicUsize::new(0);
            threads.run(6, &|_| {
                // Within a round another runs on the thread that asks for it.
                threads.run(2, &|_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(done.load(Ordering::Relaxed), 12);
        }
    }
}
