//! Making tokens: what a request of it says, and this device's part.

use crate::{core::Active, error::WorkerError, execute::Events};
use bytes::Bytes;
use galaxy_common::{BatchShape, Sampling, Wanted, plan::Phase};
use galaxy_engine::{
    choose::Text,
    compute::Inputs,
    executor::{Executor, Job},
    generate::{Generated, Generation, Told},
};
use galaxy_proto::v1;

/// Tokens that one execution may make.
const MOST: u32 = 64;

/// Tokens to make.
pub(crate) struct Making {
    pub(crate) count: u32,
    stop: Vec<u32>,
    pub(crate) phase: Phase,
    tell: bool,
}

fn wrong(why: &str) -> WorkerError {
    WorkerError::Making { why: why.to_owned() }
}

/// A text that begins, of a vocabulary of so many tokens.
pub(crate) fn text(text: v1::GoingText, vocabulary: u32) -> Result<Text, WorkerError> {
    let v1::GoingText { slot, rows, sampling, tokens, prompt } = text;
    let sampling: Sampling = postcard::from_bytes(&sampling).map_err(|_| {
        wrong("how tokens are chosen cannot be read: do coordinator and worker have the same version?")
    })?;
    let sampling = sampling.checked(vocabulary);
    let sampling = sampling.map_err(|error| WorkerError::Making { why: error.to_string() })?;
    if tokens.len() > rows as usize {
        return Err(wrong("a text has more tokens than room is taken for"));
    }
    Ok(Text { slot, rows, sampling, tokens, prompt: prompt as usize })
}

impl Making {
    /// Checks what is to be made from a batch.
    pub(crate) fn read(making: v1::Making, shape: &BatchShape) -> Result<Self, WorkerError> {
        let v1::Making { count, stop, decode, tell } = making;
        let [segment] = shape.segments() else {
            return Err(wrong("tokens of one text are made at a time"));
        };
        if !matches!(segment.wanted, Wanted::Token(_)) {
            return Err(wrong("tokens are to be made, and none is wanted of the batch"));
        }
        match count {
            0 => return Err(wrong("no tokens are to be made")),
            1 => {}
            2..=MOST if segment.rows == 1 => {}
            2..=MOST => return Err(wrong("more than one token is made from a single row only")),
            _ => {
                let why = format!("{count} tokens are to be made, and {MOST} may be at a time");
                return Err(WorkerError::Making { why });
            }
        }
        let phase = if decode { Phase::Decode } else { Phase::Prefill };
        Ok(Self { count, stop, phase, tell })
    }

    /// Makes them from what `job` begins with: what came of it, and the tokens.
    pub(crate) fn run(
        self,
        executor: &Executor,
        job: Job,
        active: &Active,
        events: &Events,
    ) -> Result<(Generated, Vec<u32>), WorkerError> {
        let Self { count, stop, phase, tell } = self;
        let mut made = Vec::with_capacity(count as usize);
        let tokens = match job.binding.inputs {
            Inputs::Tokens(tokens) => tokens.to_vec(),
            Inputs::Typed { .. } => return Err(wrong("a pair of texts does not go on")),
            Inputs::Patches { .. } => return Err(wrong("a model of images makes no text")),
        };
        let generation = Generation {
            epoch: job.epoch,
            sequence: job.sequence,
            shape: job.binding.shape,
            tokens,
            count,
            stop,
            deadline: job.deadline,
        };
        let program = |shape: &BatchShape| active.lower(phase, shape).map(|(_, program)| program);
        let generated = generation.run(executor, program, |told| {
            made.push(told[0] as u32);
            if tell {
                // There is room for all of them; whoever hung up misses nothing.
                drop(events.try_send(Ok(event(told))));
            }
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
    use galaxy_common::{Breadth, Segment};

    fn shape(rows: u32, wanted: Wanted) -> BatchShape {
        BatchShape::new(vec![Segment { slot: 1, past: 0, kept: true, rows, wanted }]).unwrap()
    }

    #[test]
    fn absurd_requests_are_refused() {
        let token = Wanted::Token(Breadth::Few);
        let read = |count, rows, wanted| {
            let making = v1::Making { count, stop: vec![], decode: true, tell: true };
            Making::read(making, &shape(rows, wanted)).map(|m| m.count).map_err(|e| e.to_string())
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
        let begins = |text: v1::GoingText| super::text(text, 10).unwrap_err().to_string();
        let sampling = |s: &Sampling| postcard::to_stdvec(s).unwrap();
        let good = v1::GoingText {
            rows: 4,
            sampling: sampling(&Sampling::greedy()),
            ..v1::GoingText::default()
        };
        assert!(super::text(good.clone(), 10).is_ok());
        assert!(begins(v1::GoingText { sampling: vec![1], ..good.clone() }).contains("version"));
        let hot = sampling(&Sampling { temperature: f32::NAN, ..Sampling::greedy() });
        assert!(begins(v1::GoingText { sampling: hot, ..good.clone() }).contains("temperature"));
        assert!(begins(v1::GoingText { tokens: vec![1; 5], ..good }).contains("room"));
    }
}
