//! HFReduce for C: `include/hfreduce.h` is the documentation.
//!
//! Invariants: no panic unwinds into C ([`error::guard`]); the shared library exports only `hfr_*`;
//! every pointer is checked before it is used. The header is written by hand; `tests/header.rs`
//! compares it with these types.

mod arguments;
mod calls;
mod comm;
mod conversions;
mod error;
mod group;
mod memory;
mod newcomer;
mod work;

pub use calls::*;
pub use comm::*;
pub use error::*;
pub use group::*;
pub use memory::*;
pub use newcomer::*;
pub use work::*;
