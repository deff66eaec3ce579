//! The short formats, exhaustively, against arithmetic that shares no code with the kernels: a table of all
//! values of a format and a search for the nearest one.

use crate::support::{Case, SHORT, targets};
use hfreduce_kernels::{Dtype, Isa, Op, Store, Width};

/// A finite format from its definition: (value, bits) of every non-negative number, in order; the
/// next power of two represents all larger values.
fn numbers(dtype: Dtype) -> Vec<(f64, u32)> {
    let (exponent_bits, fraction_bits, bias): (u32, i32, i32) = match dtype {
        Dtype::Bf16 => (8, 7, 127),
        Dtype::F16 => (5, 10, 15),
        Dtype::F8E4M3 => (4, 3, 7),
        _ => (5, 2, 15),
    };
    // E4M3 uses its last exponent for numbers; all ones is the NaN, and the first overflowing value takes its
    // place.
    let last =
        if dtype == Dtype::F8E4M3 { 0x7F } else { ((1 << exponent_bits) - 1) << fraction_bits };
    let number = |bits: u32| {
        let (exponent, fraction) = (bits >> fraction_bits, f64::from(bits % (1 << fraction_bits)));
        let unit = 2_f64.powi(exponent.max(1) as i32 - bias - fraction_bits);
        let hidden = if exponent == 0 { 0.0 } else { f64::from(1 << fraction_bits) };
        (hidden + fraction) * unit
    };
    (0..=last).map(|bits| (number(bits), bits)).collect()
}

/// The bits of a value, rounded to nearest even.
fn nearest(table: &[(f64, u32)], dtype: Dtype, value: f32) -> u32 {
    let sign = if value.is_sign_negative() { 1 << (8 * dtype.size_bytes() - 1) } else { 0 };
    let (magnitude, last) = (f64::from(value.abs()), table.len() - 1);
    if value.is_nan() {
        return match dtype {
            Dtype::Bf16 => 0x7FC0,
            Dtype::F16 => 0x7E00,
            _ => 0x7F,
        };
    }
    let above = table.partition_point(|(number, _)| *number < magnitude).min(last);
    let below = above.saturating_sub(1);
    let (down, up) = (magnitude - table[below].0, table[above].0 - magnitude);
    let even = if table[below].1.is_multiple_of(2) { below } else { above };
    let index = if up < down {
        above
    } else if down < up {
        below
    } else {
        even
    };
    // The largest number of E4M3 is one below.
    let top = if dtype == Dtype::F8E4M3 { last - 1 } else { last };
    table[index.min(top)].1 | sign
}

fn element(dtype: Dtype, bytes: &[u8], index: usize) -> u32 {
    match dtype.size_bytes() {
        1 => u32::from(bytes[index]),
        _ => u32::from(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])),
    }
}

fn every(dtype: Dtype) -> Vec<u8> {
    match dtype.size_bytes() {
        1 => (0..=u8::MAX).collect(),
        _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
    }
}

/// Every bit pattern of a format, as the kernels widen it.
fn widened(dtype: Dtype) -> Vec<f32> {
    let wide = Case { to: Width::Wide, ..Case::new(dtype, Op::Sum, vec![every(dtype)]) }.check(3);
    wide.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn every_bit_pattern_of_every_short_format_widens_to_its_defined_value() {
    for dtype in SHORT {
        let (table, values) = (numbers(dtype), widened(dtype));
        let half = values.len() / 2;
        for (bits, value) in values.iter().enumerate() {
            let expected = match table.get(bits % half) {
                Some((_, top)) if *top as usize == table.len() - 1 && dtype == Dtype::F8E4M3 => {
                    f64::NAN
                }
                Some((_, top)) if *top as usize == table.len() - 1 => f64::INFINITY,
                Some((number, _)) => *number,
                None => f64::NAN,
            };
            let expected = if bits < half { expected as f32 } else { -expected as f32 };
            if expected.is_nan() {
                assert_eq!(value.to_bits(), 0x7FC0_0000, "{dtype} {bits:#x}");
            } else {
                assert_eq!(value.to_bits(), expected.to_bits(), "{dtype} {bits:#x}");
            }
        }
    }
}

#[test]
fn a_single_input_is_returned_unchanged_except_nans() {
    for dtype in SHORT {
        let (all, table) = (every(dtype), numbers(dtype));
        let result = Case::new(dtype, Op::Sum, vec![all.clone()]).check(1);
        for (index, value) in widened(dtype).into_iter().enumerate() {
            let expected = match value.is_nan() {
                true => nearest(&table, dtype, value),
                false => element(dtype, &all, index),
            };
            assert_eq!(element(dtype, &result, index), expected, "{dtype} {index:#x}");
        }
    }
}

/// Every binary32 whose lower half is one of a few: each number and each midpoint of each format, and their
/// neighbors.
fn singles() -> Vec<f32> {
    let lower = [0_u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    (0..=0xFFFF_u32).flat_map(|upper| lower.map(|low| f32::from_bits(upper << 16 | low))).collect()
}

#[test]
fn rounding_is_to_the_nearest_number_ties_to_even() {
    let singles = singles();
    let bytes: Vec<u8> = singles.iter().flat_map(|value| value.to_le_bytes()).collect();
    for dtype in SHORT {
        let table = numbers(dtype);
        let result = Case::rounding(dtype, bytes.clone()).check(0);
        for (index, &value) in singles.iter().enumerate() {
            let expected = nearest(&table, dtype, value);
            assert_eq!(element(dtype, &result, index), expected, "{dtype} {value:e}");
        }
    }
}

#[test]
fn all_pairs_of_8_bit_numbers_are_combined_correctly() {
    for dtype in [Dtype::F8E4M3, Dtype::F8E5M2] {
        let (table, values) = (numbers(dtype), widened(dtype));
        let first: Vec<u8> = (0..=u16::MAX).map(|i| (i >> 8) as u8).collect();
        let second: Vec<u8> = (0..=u16::MAX).map(|i| i as u8).collect();
        for op in [Op::Sum, Op::Product, Op::Min, Op::Max] {
            let result = Case::new(dtype, op, vec![first.clone(), second.clone()]).check(5);
            for (index, &bits) in result.iter().enumerate() {
                let (a, b) = (values[index >> 8], values[index & 0xFF]);
                let value = match op {
                    Op::Sum => a + b,
                    Op::Product => a * b,
                    _ if a.is_nan() || b.is_nan() => f32::NAN,
                    Op::Min => {
                        if b < a {
                            b
                        } else {
                            a
                        }
                    }
                    _ => {
                        if b > a {
                            b
                        } else {
                            a
                        }
                    }
                };
                let expected = nearest(&table, dtype, value);
                assert_eq!(u32::from(bits), expected, "{dtype} {op} of {a:e} and {b:e}");
            }
        }
    }
}

#[test]
fn every_16_bit_pattern_is_combined_correctly_with_itself_and_special_values() {
    let partners = [0x0000_u16, 0x8000, 0x3C00, 0x3F80, 0x0001, 0x0400, 0x7BFF, 0x7F7F, 0x5555];
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for partner in partners {
            let other = |i: u16| if partner == 0x5555 { i ^ 0x5555 } else { partner };
            let other: Vec<u8> = (0..=u16::MAX).flat_map(|i| other(i).to_le_bytes()).collect();
            for op in [Op::Sum, Op::Product, Op::Min, Op::Max] {
                Case::new(dtype, op, vec![every(dtype), other.clone()]).check(0);
            }
        }
    }
}

#[test]
fn overflow_is_infinity_or_the_largest_number_of_a_format_without_infinity() {
    let ends = [1e30_f32, f32::INFINITY, -1e30, f32::NEG_INFINITY, 464.0, 464.1];
    let bytes: Vec<u8> = ends.iter().flat_map(|value| value.to_le_bytes()).collect();
    let round = |dtype| Case::rounding(dtype, bytes.clone()).check(0);
    assert_eq!(round(Dtype::F8E4M3), [0x7E, 0x7E, 0xFE, 0xFE, 0x7E, 0x7E]);
    assert_eq!(round(Dtype::F8E5M2)[..4], [0x7C, 0x7C, 0xFC, 0xFC]);
    let sum =
        Case::new(Dtype::F8E4M3, Op::Sum, vec![vec![0x7E; 70], vec![0x7E; 70], vec![0xFE; 70]]);
    assert_eq!(sum.check(0), [0x7E; 70], "448 + 448 - 448: no intermediate rounding");
}

/// Takes minutes: `cargo test --release -p hfreduce-kernels -- --ignored`.
#[test]
#[ignore = "all of binary32: minutes"]
fn every_binary32_is_rounded_alike_on_every_target() {
    const STEP: usize = 1 << 20;
    for start in (0..1_u64 << 32).step_by(STEP) {
        let bits = start as u32..=(start as u32 + (STEP as u32 - 1));
        let bytes: Vec<u8> = bits.flat_map(u32::to_le_bytes).collect();
        for dtype in SHORT {
            let case = Case::rounding(dtype, bytes.clone());
            let expected = case.run(Isa::Scalar, Store::Cached, 0);
            for (isa, store) in targets().filter(|(_, store)| *store == Store::Cached) {
                assert!(case.run(isa, store, 0) == expected, "{dtype} {isa:?} from {start:#x}");
            }
        }
    }
}
