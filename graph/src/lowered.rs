//! What was derived from programs, kept by the plan and the shape that they were lowered from.

use crate::{LowerError, Program, Selected, lower, takes};
use galaxy_common::{BatchShape, Plan, plan::Phase};
use galaxy_model::{Formats, ModelSpec};
use std::{collections::VecDeque, sync::Arc};

/// A whole model under a plan, ready to be lowered, as [`Selected`] is a part of one.
#[derive(Clone, Copy, Debug)]
pub struct Whole<'a> {
    /// The description of the model.
    pub spec: &'a ModelSpec,
    /// The formats of its matrices.
    pub formats: &'a Formats,
    /// The plan by which devices compute it.
    pub plan: &'a Arc<Plan>,
}

/// What was derived from the programs of some shapes: of those that were asked for last. Requests come in
/// a few shapes, and lowering takes longer than a look-up.
#[derive(Debug)]
pub struct Lowered<T> {
    most: usize,
    /// What is kept, the latest used last.
    entries: VecDeque<CachedProgram<T>>,
}

#[derive(Debug)]
struct CachedProgram<T> {
    plan: Arc<Plan>,
    phase: Phase,
    /// The shape without cached rows and slots, which programs do not know.
    shape: BatchShape,
    programs: T,
}

impl<T: Clone> Lowered<T> {
    /// Keeps what was derived for up to `most` shapes.
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), entries: VecDeque::new() }
    }

    /// What `make` derives from the programs of a model for a shape, or derived before.
    ///
    /// # Errors
    /// When the shape does not fit the plan, also where its programs are kept: its sequences may have more
    /// cached rows than those that they were lowered for.
    pub fn get(
        &mut self,
        whole: Whole<'_>,
        phase: Phase,
        shape: &BatchShape,
        make: impl FnOnce(Vec<Program>) -> T,
    ) -> Result<T, LowerError> {
        let Whole { spec, formats, plan } = whole;
        let lower = |shape: &BatchShape| lower(spec, formats, plan, phase, shape);
        self.get_by(spec, plan, phase, shape, |shape| lower(shape).map(make))
    }

    /// What [`Lowered::get`] gives, for a part of a model under the plan of that part.
    ///
    /// # Errors
    /// As [`Lowered::get`].
    pub fn get_selected(
        &mut self,
        selected: &Selected,
        phase: Phase,
        shape: &BatchShape,
        make: impl FnOnce(Vec<Program>) -> T,
    ) -> Result<T, LowerError> {
        let Selected { spec, plan, .. } = selected;
        self.get_by(spec, plan, phase, shape, |shape| selected.lower(phase, shape).map(make))
    }

    fn get_by(
        &mut self,
        spec: &ModelSpec,
        plan: &Arc<Plan>,
        phase: Phase,
        shape: &BatchShape,
        make: impl FnOnce(&BatchShape) -> Result<T, LowerError>,
    ) -> Result<T, LowerError> {
        takes(spec, plan, shape)?;
        let shape = shape.unbound();
        let same = |entry: &CachedProgram<T>| {
            Arc::ptr_eq(&entry.plan, plan) && entry.phase == phase && entry.shape == shape
        };
        let kept = self.entries.iter().position(same).and_then(|at| self.entries.remove(at));
        let entry = match kept {
            Some(entry) => entry,
            None => {
                let programs = make(&shape)?;
                CachedProgram { plan: plan.clone(), phase, shape, programs }
            }
        };
        let programs = entry.programs.clone();
        if self.entries.len() == self.most {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
        Ok(programs)
    }
}
