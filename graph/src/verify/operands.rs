//! Operands: each operation reads as much, of such elements, as its operator needs to compute what it
//! writes, and has the workspace for it.

use super::{VerifyError, site};
use crate::{
    operators::{Axes, Operate, OperatorGraph, Reach, Sizes, ValueId},
    program::{Element, Memory, OpId, OpKind, Operation, Program, Region, Role},
};
use galaxy_common::{BatchShape, Column, Row, Span};

/// Checks all operations of a program.
pub(super) fn check(
    graph: &OperatorGraph,
    shape: &BatchShape,
    program: &Program,
) -> Result<(), VerifyError> {
    for (id, op) in (0..).map(OpId).zip(&program.operations) {
        let operands = Operands { graph, shape, program, id, op };
        operands.moves_rows_as_they_are()?;
        let operator = op.kind.operator().and_then(|id| graph.get(id));
        let operate = operator.map(|operator| operator.operate());
        operands.elements(operate)?;
        if let Some(operate) = operate {
            operands.reaches(operate)?;
            operands.works(operate)?;
        }
    }
    Ok(())
}

struct Operands<'a> {
    graph: &'a OperatorGraph,
    shape: &'a BatchShape,
    program: &'a Program,
    id: OpId,
    op: &'a Operation,
}

impl Operands<'_> {
    fn axes(&self, value: ValueId) -> Option<Axes> {
        self.graph.values.get(value.0 as usize).map(|value| value.axes)
    }

    /// Checks that what only moves rows to another tensor puts each where it was.
    fn moves_rows_as_they_are(&self) -> Result<(), VerifyError> {
        let moves = matches!(self.op.kind, OpKind::Export { .. } | OpKind::Import | OpKind::Add);
        match (self.op.reads.first(), self.op.writes.first()) {
            (Some(read), Some(made)) if moves && read.rows != made.rows => {
                Err(self.too_few(0, made.rows))
            }
            _ => Ok(()),
        }
    }

    /// Checks that elements are read and written as what they are.
    fn elements(&self, operate: Option<&dyn Operate>) -> Result<(), VerifyError> {
        let (of_reads, of_writes) = match operate {
            Some(operate) => operate.elements(),
            // What moves elements on the device takes them as they are.
            None => {
                let moved = self.op.reads.first().filter(|_| self.op.kind == OpKind::Select);
                let of =
                    moved.map_or(Element::F32, |read| self.program.tensor(read.tensor).element);
                (of, of)
            }
        };
        let values = operate.map_or(usize::MAX, |operate| operate.reads().len());
        let read = |at| if at < values { of_reads } else { of_writes };
        let reads = self.op.reads.iter().enumerate().map(|(at, region)| (region, read(at)));
        let writes = self.op.writes.iter().map(|region| (region, of_writes));
        for (region, on_device) in reads.chain(writes) {
            let tensor = self.program.tensor(region.tensor);
            let want = match tensor.memory {
                Memory::Device => on_device,
                Memory::Staging | Memory::Stream => tensor.memory.element(self.program.wire),
            };
            if tensor.element != want {
                return Err(VerifyError::Element {
                    site: site(self.program, self.id),
                    tensor: region.tensor.0,
                    have: tensor.element,
                    want,
                });
            }
        }
        Ok(())
    }

    /// Checks that the rows and pixels are read that those which are computed need.
    fn reaches(&self, operate: &dyn Operate) -> Result<(), VerifyError> {
        let Some(made) = self.op.writes.first() else { return Ok(()) };
        let values = operate.reads();
        let Some(own) = self.axes(operate.makes()) else { return Ok(()) };
        for at in 0..self.program.operands(self.op) {
            let region = &self.op.reads[at];
            let read = values.get(at).map_or(Some(own), |value| self.axes(*value));
            let Some(read) = read else { continue };
            for needed in self.rows(operate.reach(at), made.rows, (own, read)) {
                if !region.rows.contains(needed) {
                    return Err(self.too_few(at, needed));
                }
            }
            if let Some(needed) = pixels(operate.reach_in_row(at), made.columns, (own, read)) {
                let is = |region: &Region, axes: Axes| {
                    self.program.tensor(region.tensor).width == axes.columns()
                };
                if !is(region, read) || !is(made, own) || !region.columns.contains(needed) {
                    return Err(self.too_few(at, needed));
                }
            }
        }
        Ok(())
    }

    /// The rows that `made` needs, of each text or image by itself.
    fn rows(
        &self,
        reach: Reach,
        made: Span<Row>,
        (own, read): (Axes, Axes),
    ) -> impl Iterator<Item = Span<Row>> {
        let same = (reach == Reach::Same).then_some(made);
        let items = self.shape.placed().enumerate().filter(move |_| same.is_none());
        let place = |axes: Axes, at: usize, text: Span<Row>| match axes {
            Axes::Text { .. } => text,
            Axes::Image { height, .. } => {
                let start = (at as u32).saturating_mul(height);
                Span::new(start, start.saturating_add(height))
            }
        };
        let of_items = items.map(move |(at, (text, _))| {
            reach.of(made, place(own, at, text), place(read, at, text))
        });
        same.into_iter().chain(of_items)
    }

    /// Checks that there is as much workspace as an operation of its sizes needs.
    fn works(&self, operate: &dyn Operate) -> Result<(), VerifyError> {
        let needs = operate.workspace(Sizes::of(self.op));
        let of = |region: &&Region| self.program.tensor(region.tensor).role == Role::Workspace;
        let has: u64 = self.op.writes.iter().filter(of).map(|r| self.program.region_bytes(r)).sum();
        match has >= needs {
            true => Ok(()),
            false => Err(VerifyError::Workspace { site: site(self.program, self.id), has, needs }),
        }
    }

    fn too_few(&self, at: usize, needed: impl std::fmt::Debug) -> VerifyError {
        VerifyError::Reach { site: site(self.program, self.id), at, needed: format!("{needed:?}") }
    }
}

/// The columns that those columns of an image need; `None` of what has no pixels.
fn pixels(reach: Reach, made: Span<Column>, (own, read): (Axes, Axes)) -> Option<Span<Column>> {
    let Axes::Image { width: own_width, channels: own_channels, .. } = own else { return None };
    let Axes::Image { width, channels, .. } = read else { return None };
    let own_channels = own_channels.max(1);
    let first = made.start() / own_channels;
    let made = Span::<Column>::new(first, made.end().div_ceil(own_channels).max(first));
    let needed = reach.of(made, Span::first(own_width), Span::first(width));
    Some(Span::new(needed.start() * channels, needed.end() * channels))
}
