//! Making tokens: one device's part, which is every other device's, too.
//!
//! A program of one row runs again and again, each time with the token that it chose. Where candidates did not
//! prove a choice, the same row runs once more with a program that names more; every device finds that out by
//! itself, from the same tiles.

use crate::{
    compute::{Binding, Inputs},
    executor::{Executor, Job, RunError, RunReport, Step},
};
use galaxy_common::{BatchShape, Breadth, Epoch, GeneratedToken, Segment, SequenceNumber, Wanted};
use galaxy_graph::{Program, program::TOKEN_VALUES};
use std::{sync::Arc, time::Instant};

/// What is told of a token: [`TOKEN_VALUES`].
pub type Told = [f32; TOKEN_VALUES as usize];

/// A token by what is told of it, with what it adds to the text.
pub fn token(told: &Told, text: String) -> GeneratedToken {
    let [token, logprob, _, count, likely @ ..] = told;
    let top = likely.chunks_exact(2).take(*count as usize).map(|pair| (pair[0] as u32, pair[1]));
    GeneratedToken { token: *token as u32, logprob: *logprob, top: top.collect(), text }
}

/// Tokens that are made at a time, before anybody may say that they are enough: on a device that makes a token
/// in 50 ms, four fifths of a second.
pub const STINT: u32 = 16;

/// Tokens to make.
pub struct Generation {
    /// Epoch of the links.
    pub epoch: Epoch,
    /// Its place in the epoch.
    pub sequence: SequenceNumber,
    /// One text, whose rows come first: those of a prompt, or of the last token.
    pub shape: BatchShape,
    /// These rows.
    pub tokens: Vec<u32>,
    /// How many to make; more than one only from a single row.
    pub count: u32,
    /// None is made behind one of these.
    pub stop: Vec<u32>,
    /// When to give up.
    pub deadline: Option<Instant>,
}

/// What came of it.
#[derive(Debug)]
pub struct Generated {
    /// From the first step to the last; results and timeline are of the last.
    pub report: RunReport,
    /// How many tokens were made.
    pub count: u32,
    /// How many candidates the last choice needed of each device: a good guess for the next.
    pub breadth: Breadth,
}

/// How many candidates the text of a batch is asked for.
fn breadth(shape: &BatchShape) -> Breadth {
    match shape.segments().first().map(|segment| segment.wanted) {
        Some(Wanted::Token(breadth)) => breadth,
        _ => Breadth::Few,
    }
}

impl Generation {
    /// Makes tokens, and tells of each. `program` gives this device's program for a shape.
    ///
    /// # Errors
    /// When a program is not to be had, or a run fails.
    pub fn run<E: From<RunError>>(
        self,
        executor: &Executor,
        mut program: impl FnMut(&BatchShape) -> Result<Arc<Program>, E>,
        mut tell: impl FnMut(&Told),
    ) -> Result<Generated, E> {
        let Self { epoch, sequence, mut shape, mut tokens, count, stop, deadline } = self;
        let (mut made, mut before) = (0, None::<RunReport>);
        loop {
            let inputs = Inputs::from(tokens.as_slice());
            let binding = Binding { shape: shape.clone(), inputs };
            let program = program(&shape)?;
            let job = Job { epoch, sequence, program, binding, deadline };
            let (mut proved, mut last, mut behind) = (true, 0, 0);
            let mut report = executor.run_steps(job, &mut |told| {
                proved = told[2] > 0.0;
                if !proved {
                    return Step::Done;
                }
                tell(told);
                made += 1;
                last = told[0] as u32;
                if made >= count || stop.contains(&last) {
                    return Step::Done;
                }
                behind += 1;
                Step::Next
            })?;
            if let Some(before) = &before {
                report.follow(before);
            }
            if proved {
                return Ok(Generated { report, count: made, breadth: breadth(&shape) });
            }
            before = Some(report);
            // All steps but the last became past.
            let mut segments: Vec<Segment> = shape.segments().to_vec();
            for segment in &mut segments {
                segment.past = segment.past.saturating_add(segment.rows * behind);
                if let Wanted::Token(breadth) = segment.wanted {
                    let Some(wider) = breadth.wider() else {
                        let why = "all candidates do not prove a choice".to_owned();
                        return Err(RunError::Program(why).into());
                    };
                    segment.wanted = Wanted::Token(wider);
                }
            }
            if behind > 0 {
                tokens = vec![last];
            }
            shape =
                BatchShape::new(segments).map_err(|error| RunError::Program(error.to_string()))?;
        }
    }
}
