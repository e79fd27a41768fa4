//! Samples of points, and the tables that they become. Pure.

use super::setup::Taken;
use galaxy_common::{Kernel, Spread, Table};
use std::collections::BTreeMap;

/// Samples that a point has at least, if there is time.
pub(super) const LEAST: usize = 3;
/// Samples after which a point that is noisy stays so.
const MOST: usize = 25;
/// The spread above which a point is measured again.
const NOISY: f64 = 0.10;

/// The times that were measured so far for each point, in nanoseconds.
#[derive(Default)]
pub(super) struct Samples(BTreeMap<(Kernel, Vec<u32>), Vec<f64>>);

impl Samples {
    pub(super) fn add(&mut self, taken: &mut Vec<Taken>) {
        for (kernel, sizes, nanos) in taken.drain(..) {
            // A clock that did not move has measured something, if less than it can tell.
            self.0.entry((kernel, sizes)).or_default().push(nanos.max(1.0));
        }
    }

    /// Whether some point that `of` picks needs another sample.
    pub(super) fn wanting(&self, of: impl Fn(Kernel, &[u32]) -> bool) -> bool {
        self.0.iter().any(|((kernel, sizes), samples)| {
            let few = samples.len() < LEAST;
            let noisy = samples.len() < MOST && spread(samples) > NOISY;
            (few || noisy) && of(*kernel, sizes)
        })
    }

    /// A table for each kernel that was measured. Points of its grid that no sequence has are filled in
    /// proportion to their last axis but one, from the largest that was measured. All times are
    /// multiplied by `factor`.
    pub(super) fn tables(&self, factor: f64) -> Vec<Table> {
        Kernel::ALL.into_iter().filter_map(|kernel| self.table(kernel, factor)).collect()
    }

    fn table(&self, kernel: Kernel, factor: f64) -> Option<Table> {
        let points = || self.0.iter().filter(move |((k, _), _)| *k == kernel);
        let axis = |at: usize| {
            let mut sizes: Vec<u32> = points().map(|((_, sizes), _)| sizes[at]).collect();
            sizes.sort_unstable();
            sizes.dedup();
            sizes
        };
        points().next()?;
        let axes: Vec<Vec<u32>> = (0..kernel.axes()).map(axis).collect();
        let mut grid: Vec<Vec<u32>> = vec![Vec::new()];
        for axis in &axes {
            let longer = |sizes: Vec<u32>| axis.iter().map(move |&s| [&sizes[..], &[s]].concat());
            grid = grid.into_iter().flat_map(longer).collect();
        }
        let value = |sizes: &Vec<u32>| {
            let (nanos, spread) = self.value(kernel, sizes);
            (nanos * factor, spread)
        };
        let (nanos, spread) = grid.iter().map(value).unzip();
        Some(Table { kernel, axes, nanos, spread })
    }

    fn value(&self, kernel: Kernel, sizes: &[u32]) -> (f64, f64) {
        if let Some(samples) = self.0.get(&(kernel, sizes.to_vec())) {
            return (Spread::of(samples).median, spread(samples));
        }
        let mut alike = self.0.iter().filter(|((k, at), _)| {
            *k == kernel
                && at.len() == 3
                && (at[0], at[2]) == (sizes[0], sizes[2])
                && at[1] < sizes[1]
        });
        alike.next_back().map_or((f64::NAN, 0.0), |((_, at), samples)| {
            let factor = f64::from(sizes[1]) / f64::from(at[1]);
            (Spread::of(samples).median * factor, spread(samples))
        })
    }
}

/// Range of the middle half of the samples over their median.
fn spread(samples: &[f64]) -> f64 {
    let all = Spread::of(samples);
    (all.upper_quartile - all.lower_quartile) / all.median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_a_table_of_medians_and_spreads() {
        let mut samples = Samples::default();
        for time in [10.0, 30.0, 20.0] {
            for (rows, columns) in [(1, 8), (4, 8), (1, 2), (4, 2)] {
                let nanos = time * f64::from(rows * columns);
                samples.add(&mut vec![(Kernel::Up, vec![rows, columns], nanos)]);
            }
        }
        let [table] = &samples.tables(1.0)[..] else { panic!("one kernel, one table") };
        assert_eq!(table.axes, [[1, 4], [2, 8]]);
        assert_eq!(table.nanos, [40.0, 160.0, 160.0, 640.0]);
        assert_eq!(table.spread, [0.5; 4], "the middle half of 10, 20, 30");
        assert!(samples.wanting(|kernel, _| kernel == Kernel::Up));
        assert!(!samples.wanting(|kernel, _| kernel == Kernel::Down));
        for _ in 0..20 {
            samples.add(&mut vec![(Kernel::Up, vec![1, 8], 160.0)]);
        }
        assert!(!samples.wanting(|_, sizes| sizes == [1, 8]), "steady");
    }

    #[test]
    fn table_cells_without_samples_are_filled_in_proportion() {
        let mut samples = Samples::default();
        for (queries, keys, nanos) in [(1, 1, 5.0), (1, 4, 8.0), (4, 1, 9.0)] {
            samples.add(&mut vec![(Kernel::Attend, vec![queries, keys, 2], nanos)]);
        }
        let tables = samples.tables(1.0);
        assert_eq!(tables[0].nanos, [5.0, 8.0, 9.0, 36.0]);
        assert!(samples.wanting(|_, _| true), "one sample each");
    }

    #[test]
    fn a_measured_time_of_zero_becomes_one_nanosecond() {
        let mut samples = Samples::default();
        samples.add(&mut vec![(Kernel::AddNorm, vec![1], 0.0)]);
        assert_eq!(samples.tables(1.0)[0].nanos, [1.0]);
    }
}
