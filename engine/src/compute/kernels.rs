//! Everything that does arithmetic: products, attention, what is done to rows.
//!
//! One set of instructions is chosen when a process starts ([`instructions`]); every kernel is written once,
//! over vectors of whatever width, and compiled for each set. The one loop in which nearly all time passes is
//! `micro`; products and attention are built on it. Products with weights in blocks of few bits have one of
//! their own, in `blocks`.
//!
//! This module alone has unsafe code: in `instructions` (calling what was compiled for a processor
//! that has been looked at), in `micro` (loads without a bounds check, after one check for all), in
//! `blocks` (the same, and products of bytes, which only some processors have), in
//! `area` (columns of one rectangle for several threads), in `threads` (work that other threads
//! borrow for a moment) and in `lines` (advice about pages).

pub(crate) mod activation;
pub(crate) mod area;
pub(crate) mod attention;
pub(crate) mod blocks;
pub(crate) mod ceiling;
pub(crate) mod dense;
pub(crate) mod eighths;
pub mod instructions;
pub(crate) mod lines;
pub(crate) mod micro;
pub(crate) mod network;
pub(crate) mod packed;
pub(crate) mod rotary;
pub(crate) mod rows;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod threads;
pub(crate) mod vector;
pub(crate) mod windows;
pub(crate) mod wire;
