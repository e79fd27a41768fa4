//! Making tokens: what a request of it says, and this device's part.

use crate::{core::Active, error::WorkerError, execute::Events};
use bytes::Bytes;
use galaxy_common::{BatchShape, Stint, Text, Wanted};
use galaxy_engine::{
    compute::Inputs,
    executor::{Executor, Job},
    generate::{Generated, Generation, Goal, Told},
};
use galaxy_proto::v1;

/// Tokens that one execution may make.
const MOST: u32 = 64;

/// Tokens to make, and whether each is told of.
pub(crate) struct Making {
    pub(crate) stint: Stint,
    tell: bool,
}

fn wrong(why: &str) -> WorkerError {
    WorkerError::Making { why: why.to_owned() }
}

/// Checks a text that begins, of a vocabulary of so many tokens.
pub(crate) fn checked(text: Text, vocabulary: u32) -> Result<Text, WorkerError> {
    let sampling = text.sampling.checked(vocabulary);
    let sampling = sampling.map_err(|error| WorkerError::Making { why: error.to_string() })?;
    if text.tokens.len() > text.rows as usize {
        return Err(wrong("a text has more tokens than room is taken for"));
    }
    Ok(Text { sampling, ..text })
}

impl Making {
    /// Checks what is to be made from a batch.
    pub(crate) fn read(making: v1::Making, shape: &BatchShape) -> Result<Self, WorkerError> {
        let (tell, stint) = (making.tell, Stint::from(making));
        let [segment] = shape.segments() else {
            return Err(wrong("tokens of one text are made at a time"));
        };
        if !matches!(segment.wanted, Wanted::Token(_)) {
            return Err(wrong("tokens are to be made, and none is wanted of the batch"));
        }
        match stint.count {
            0 => return Err(wrong("no tokens are to be made")),
            1 => {}
            2..=MOST if segment.rows == 1 => {}
            2..=MOST => return Err(wrong("more than one token is made from a single row only")),
            count => {
                let why = format!("{count} tokens are to be made, and {MOST} may be at a time");
                return Err(WorkerError::Making { why });
            }
        }
        Ok(Self { stint, tell })
    }

    /// Makes them from what `job` begins with: what came of it, and the tokens.
    pub(crate) fn run(
        self,
        executor: &Executor,
        job: Job,
        active: &Active,
        events: &Events,
    ) -> Result<(Generated, Vec<u32>), WorkerError> {
        let Self { stint: Stint { phase, count, stop }, tell } = self;
        let mut made = Vec::with_capacity(count as usize);
        match job.binding.inputs {
            Inputs::Tokens(_) => {}
            Inputs::Typed { .. } => return Err(wrong("a pair of texts does not go on")),
            Inputs::Patches { .. } => return Err(wrong("a model of images makes no text")),
        }
        let generation = Generation { first: job, goals: vec![Goal { count, stop, mask: None }] };
        let program = |shape: &BatchShape| active.lower(phase, shape).map(|(_, program)| program);
        let generated = generation.run(executor, program, |_, told| {
            made.push(told[0] as u32);
            if tell {
                // There is room for all of them; whoever hung up misses nothing.
                drop(events.try_send(Ok(event(told))));
            }
            None
        })?;
        Ok((generated, made))
    }
}

fn event(told: &Told) -> v1::ExecuteEvent {
    let bytes = Bytes::copy_from_slice(bytemuck::cast_slice(told));
    v1::ExecuteEvent { event: Some(v1::execute_event::Event::Token(bytes)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::{Breadth, Sampling, Segment};

    fn shape(rows: u32, wanted: Wanted) -> BatchShape {
        BatchShape::new(vec![Segment { slot: 1, past: 0, kept: true, rows, wanted }]).unwrap()
    }

    #[test]
    fn absurd_requests_are_refused() {
        let token = Wanted::Token(Breadth::Few);
        let read = |count, rows, wanted| {
            let making = v1::Making { count, stop: vec![], decode: true, tell: true };
            Making::read(making, &shape(rows, wanted))
                .map(|m| m.stint.count)
                .map_err(|e| e.to_string())
        };
        assert_eq!(read(64, 1, token), Ok(64));
        assert_eq!(read(1, 9, token), Ok(1));
        for (count, rows, wanted, says) in [
            (0, 1, token, "no tokens"),
            (65, 1, token, "64 may be"),
            (u32::MAX, 1, token, "64 may be"),
            (2, 9, token, "single row"),
            (1, 9, Wanted::Nothing, "none is wanted"),
        ] {
            let error = read(count, rows, wanted).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let begins = |text: v1::GoingText| checked(text.try_into()?, 10);
        let refused = |text: v1::GoingText| begins(text).unwrap_err().to_string();
        let sampling = |s: &Sampling| postcard::to_stdvec(s).unwrap();
        let good = v1::GoingText {
            rows: 4,
            sampling: sampling(&Sampling::greedy()),
            ..v1::GoingText::default()
        };
        assert!(begins(good.clone()).is_ok());
        assert!(refused(v1::GoingText { sampling: vec![1], ..good.clone() }).contains("version"));
        let hot = sampling(&Sampling { temperature: f32::NAN, ..Sampling::greedy() });
        assert!(refused(v1::GoingText { sampling: hot, ..good.clone() }).contains("temperature"));
        assert!(refused(v1::GoingText { tokens: vec![1; 5], ..good }).contains("room"));
    }
}
