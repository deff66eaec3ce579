//! Determinism modes: guarantees about result bits beyond the default.
//!
//! By default equal operations produce equal bits. The modes have a cost and may be combined:
//! - `stable`: an element is summed in one order wherever it is in an operation, so its bits do not
//!   depend on how tensors are grouped into operations or split;
//! - `wide`: partial sums of 16- and 8-bit elements travel in binary32 and are rounded once.
//!
//! In every mode, partial sums between nodes are wide where the result may fit the type and a
//! partial sum may not: averages of fp16, and sums and products in fp8, which saturates at finite
//! values. Otherwise the result would depend on which ranks share a node.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::kind::Kind;
use crate::{DType, ReduceOp};

/// See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Determinism {
    /// Every element is summed in one order.
    pub stable: bool,
    /// Partial sums are not rounded.
    pub wide: bool,
}

const STABLE: u8 = 1;
const WIDE: u8 = 2;

impl Determinism {
    /// No additional guarantee.
    pub const DEFAULT: Self = Self { stable: false, wide: false };

    /// The modes that affect such an operation. Integers have the same bits in every order, and so
    /// have minimum and maximum.
    #[must_use]
    #[inline]
    pub fn of(self, kind: Kind, dtype: DType, op: ReduceOp) -> Self {
        let rounds = rounds(kind, dtype, op);
        Self { stable: rounds && self.stable, wide: rounds && self.wide && dtype.wide() != dtype }
    }

    /// [`Determinism::of`] for a group of several nodes: also wide where a partial sum may leave
    /// the range of the type although the result is inside it.
    #[must_use]
    #[inline]
    pub fn between_nodes(self, kind: Kind, dtype: DType, op: ReduceOp) -> Self {
        let modes = self.of(kind, dtype, op);
        let overflows = dtype.is_fp8() || (dtype == DType::F16 && op == ReduceOp::Average);
        Self { wide: modes.wide || (overflows && rounds(kind, dtype, op)), ..modes }
    }

    /// Encodes the modes as a number below 4.
    #[inline]
    pub fn code(self) -> u8 {
        u8::from(self.stable) * STABLE + u8::from(self.wide) * WIDE
    }

    /// Decodes the lowest two bits of a number.
    #[inline]
    pub fn from_code(code: u8) -> Self {
        Self { stable: code & STABLE != 0, wide: code & WIDE != 0 }
    }
}

/// True if the bits of such an operation depend on the order or the width of its partial results.
fn rounds(kind: Kind, dtype: DType, op: ReduceOp) -> bool {
    let adds = matches!(op, ReduceOp::Sum | ReduceOp::Product | ReduceOp::Average);
    kind.reduces() && dtype.is_float() && adds
}

impl fmt::Display for Determinism {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match (self.stable, self.wide) {
            (false, false) => "default",
            (true, false) => "stable",
            (false, true) => "wide",
            (true, true) => "stable,wide",
        })
    }
}

/// A determinism mode that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected default, stable, wide or `stable,wide`")]
pub struct UnknownMode;

impl FromStr for Determinism {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let mut modes = Self::DEFAULT;
        if text == "default" {
            return Ok(modes);
        }
        for word in text.split(',') {
            let mode = match word.trim() {
                "stable" => &mut modes.stable,
                "wide" => &mut modes.wide,
                _ => return Err(UnknownMode),
            };
            if std::mem::replace(mode, true) {
                return Err(UnknownMode);
            }
        }
        Ok(modes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_parsed() {
        for code in 0..4 {
            let modes = Determinism::from_code(code);
            assert_eq!((modes.code(), modes.to_string().parse::<Determinism>()), (code, Ok(modes)));
        }
        for wrong in ["", "Stable", "stable,stable", "default,wide", "wide,", "fast"] {
            assert_eq!(wrong.parse::<Determinism>(), Err(UnknownMode), "{wrong}");
        }
    }

    #[test]
    fn a_mode_that_changes_nothing_is_none() {
        let both = Determinism { stable: true, wide: true };
        let of = |dtype, op| both.of(Kind::Allreduce, dtype, op).to_string();
        assert_eq!(of(DType::Bf16, ReduceOp::Average), "stable,wide");
        assert_eq!(of(DType::F32, ReduceOp::Product), "stable");
        assert_eq!(of(DType::F16, ReduceOp::Max), "default");
        assert_eq!(of(DType::I32, ReduceOp::Sum), "default");
        let moved = both.of(Kind::Allgather, DType::F16, ReduceOp::Sum);
        assert_eq!(moved, Determinism::DEFAULT);
    }

    #[test]
    fn partial_sums_between_nodes_are_wide_where_they_may_overflow() {
        let wide = |kind, dtype, op| Determinism::DEFAULT.between_nodes(kind, dtype, op).wide;
        assert!(wide(Kind::Allreduce, DType::F16, ReduceOp::Average));
        assert!(wide(Kind::ReduceScatter, DType::F8E4M3, ReduceOp::Sum));
        assert!(wide(Kind::Reduce, DType::F8E5M2, ReduceOp::Product));
        assert!(!wide(Kind::Allreduce, DType::F16, ReduceOp::Sum));
        assert!(!wide(Kind::Allreduce, DType::Bf16, ReduceOp::Average));
        assert!(!wide(Kind::Allreduce, DType::F8E4M3, ReduceOp::Max));
        assert!(!wide(Kind::Allgather, DType::F8E4M3, ReduceOp::Sum));
    }
}
