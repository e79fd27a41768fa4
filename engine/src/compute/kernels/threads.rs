//! The kernel threads of one engine: exactly as many as the device grants.

use super::area::Cut;

/// Below this many values an operation is done before another thread has woken up.
const WORTH_SHARING: usize = 1 << 14;

/// Threads that share the work of an operation. The compute thread waits while they work, so
/// there are never more busy kernel threads than granted.
pub(crate) struct Threads {
    pool: Option<rayon::ThreadPool>,
    count: usize,
}

impl Threads {
    /// `count` threads; with one (or where the system gives no more), the caller works itself.
    pub(crate) fn new(count: u16) -> Self {
        let count = usize::from(count).max(1);
        let pool = (count > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(count)
                    .thread_name(|i| format!("galaxy-kernel-{i}"))
                    .build()
                    .inspect_err(
                        |error| tracing::warn!(%error, count, "no kernel threads: one has to do"),
                    )
                    .ok()
            })
            .flatten();
        let count = if pool.is_some() { count } else { 1 };
        Self { pool, count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The place of the calling kernel thread, below [`Threads::count`].
    pub(crate) fn index(&self) -> usize {
        match &self.pool {
            Some(pool) => pool.current_thread_index().unwrap_or(0),
            None => 0,
        }
    }

    /// Runs `work` on a kernel thread, and waits.
    pub(crate) fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
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
        let grain = grain.max(items.div_ceil(self.count * 2)).max(1);
        if self.count == 1 || values < WORTH_SHARING || items <= grain {
            work(0, whole);
        } else {
            self.inside(|| halve(whole, 0, grain, &work));
        }
    }
}

fn halve<T: Cut>(whole: T, first: usize, grain: usize, work: &(impl Fn(usize, T) + Sync)) {
    let items = whole.items();
    if items <= grain {
        return work(first, whole);
    }
    // Pieces stay multiples of the grain, so that what is grouped by it stays together.
    let at = (items.div_ceil(grain) / 2) * grain;
    let (head, tail) = whole.cut(at);
    rayon::join(|| halve(head, first, grain, work), || halve(tail, first + at, grain, work));
}
