//! The vector instructions that the kernels use.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use rten_simd::isa::ArmNeonIsa;
#[cfg(target_arch = "x86_64")]
use rten_simd::{
    Isa,
    isa::{Avx2Isa, Avx512Isa},
};
use rten_simd::{SimdOp, isa::GenericIsa};
use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicU8, Ordering},
};

/// A set of vector instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Instructions {
    /// No vectors that kernels are written for: arrays of four values, of which the compiler makes what it can.
    Portable,
    /// NEON, which every 64-bit Arm processor has.
    Neon,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, VL, BW and DQ.
    Avx512,
}

const ALL: [Instructions; 4] =
    [Instructions::Portable, Instructions::Neon, Instructions::Avx2, Instructions::Avx512];

/// Why kernels cannot use some instructions.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InstructionsError {
    /// The name is not that of any instructions.
    #[error("no instructions are called {0:?}; there are avx512, avx2, neon and portable")]
    Unknown(String),
    /// This processor does not have the instructions.
    #[error("this processor does not have {0}: {best} is the best that it has", best = Instructions::detected())]
    Missing(Instructions),
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for Instructions {
    type Err = InstructionsError;
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = ALL.into_iter().find(|i| i.to_string() == name);
        found.ok_or_else(|| InstructionsError::Unknown(name.to_owned()))
    }
}

/// The instructions that are used, plus one; 0 before the processor has been looked at.
static CURRENT: AtomicU8 = AtomicU8::new(0);

/// Makes all kernels of this process use `instructions` instead of the best that it finds: to
/// measure, to test, or to work around a processor that says more than it does. Which instructions
/// are used changes no layout in memory, so it may be called at any time.
///
/// # Errors
/// When this processor does not have them.
pub fn limit(instructions: Instructions) -> Result<(), InstructionsError> {
    if !instructions.available() {
        return Err(InstructionsError::Missing(instructions));
    }
    CURRENT.store(instructions as u8 + 1, Ordering::Relaxed);
    Ok(())
}

impl Instructions {
    /// The instructions that the kernels of this process use.
    pub fn current() -> Self {
        match CURRENT.load(Ordering::Relaxed) {
            0 => {
                let detected = Self::detected();
                // A limit that came meanwhile stays.
                let (set, order) = (detected as u8 + 1, Ordering::Relaxed);
                match CURRENT.compare_exchange(0, set, order, order) {
                    Ok(_) => detected,
                    Err(limit) => ALL[usize::from(limit) - 1],
                }
            }
            current => ALL[usize::from(current) - 1],
        }
    }

    /// The best instructions that this processor has.
    pub fn detected() -> Self {
        ALL.into_iter().rev().find(|i| i.available()).unwrap_or(Self::Portable)
    }

    /// Whether this processor has the instructions.
    pub fn available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => ArmNeonIsa::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2Isa::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512Isa::new().is_some(),
            _ => false,
        }
    }

    /// All instructions that this processor has, for tests.
    #[cfg(test)]
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        ALL.into_iter().filter(|i| i.available())
    }

    /// Runs `op`, compiled for these instructions, or portably where they are not there.
    #[inline]
    pub(crate) fn run<Op: SimdOp>(self, op: Op) -> Op::Output {
        match self {
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                if let Some(isa) = ArmNeonIsa::new() {
                    return op.eval(isa);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                if let Some(isa) = Avx2Isa::new() {
                    // SAFETY: `Avx2Isa` exists only where the processor has avx2, fma and f16c.
                    return unsafe { eval_avx2(op, isa) };
                }
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                if let Some(isa) = Avx512Isa::new() {
                    // SAFETY: `Avx512Isa` exists only where the processor has avx512f, vl, bw, dq
                    // and f16c.
                    return unsafe { eval_avx512(op, isa) };
                }
            }
            _ => {}
        }
        op.eval(GenericIsa::new())
    }
}

// SAFETY: to be called only where the processor has these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma,f16c")]
unsafe fn eval_avx2<Op: SimdOp>(op: Op, isa: impl Isa) -> Op::Output {
    op.eval(isa)
}

// SAFETY: to be called only where the processor has these.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,f16c")]
unsafe fn eval_avx512<Op: SimdOp>(op: Op, isa: impl Isa) -> Op::Output {
    op.eval(isa)
}

/// Runs `op` with the instructions that the kernels of this process use.
#[inline]
pub(crate) fn run<Op: SimdOp>(op: Op) -> Op::Output {
    Instructions::current().run(op)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_errors() {
        for instructions in ALL {
            assert_eq!(instructions.to_string().parse(), Ok(instructions));
        }
        let error = "sse9".parse::<Instructions>().expect_err("no such instructions");
        assert!(error.to_string().contains("avx512, avx2, neon and portable"), "{error}");
    }

    #[test]
    fn the_detected_instruction_set_is_available() {
        assert!(Instructions::detected().available());
        assert!(Instructions::all().any(|i| i == Instructions::Portable));
        let missing =
            if cfg!(target_arch = "aarch64") { Instructions::Avx2 } else { Instructions::Neon };
        assert_eq!(limit(missing), Err(InstructionsError::Missing(missing)));
    }
}
