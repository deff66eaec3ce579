//! Partial results in fp32, and averages, in the same pass.

use proptest::prelude::*;

use crate::support::{Case, SHORT, pairs, random, special};
use hfreduce_kernels::{Dtype, Isa, KernelError, Op, Pass, Store, Width};

fn singles(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn canonical(value: f32) -> u32 {
    if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() }
}

#[test]
fn a_wide_result_is_the_sum_of_the_widened_inputs_and_not_rounded() {
    for dtype in SHORT {
        let inputs: Vec<_> = (0..5).map(|n| special(dtype, 131, n)).collect();
        let wide = |inputs| Case { to: Width::Wide, ..Case::new(dtype, Op::Sum, inputs) }.check(4);
        let each: Vec<_> = inputs.iter().map(|input| singles(&wide(vec![input.clone()]))).collect();
        let sum = singles(&wide(inputs));
        for (at, value) in sum.iter().enumerate() {
            let expected = each.iter().map(|input| input[at]).reduce(|a, b| a + b).unwrap();
            assert_eq!(value.to_bits(), canonical(expected), "{dtype} at {at}");
        }
    }
}

#[test]
fn a_tree_of_wide_passes_in_the_same_order_equals_one_pass() {
    for (dtype, op) in pairs() {
        let inputs: Vec<_> = (0..7).map(|n| random(dtype.size_bytes() * 333, n + 1)).collect();
        let whole = Case::new(dtype, op, inputs.clone()).check(0);
        // ((0, 1, 2) wide, then 3..6): the reduction is a left fold, so the leaf's result comes first.
        let leaf = Case { to: Width::Wide, ..Case::new(dtype, op, inputs[..3].to_vec()) }.check(1);
        let widened = |input: &Vec<u8>| {
            Case { to: Width::Wide, ..Case::new(dtype, op, vec![input.clone()]) }.check(2)
        };
        let mut wide = vec![leaf];
        wide.extend(inputs[3..].iter().map(widened));
        let root = Case { wide, ..Case::new(dtype, op, vec![]) }.check(3);
        assert!(root == whole, "{dtype} {op}");
    }
}

#[test]
fn a_type_that_is_its_own_wide_type_combines_both_lists() {
    for dtype in [Dtype::F32, Dtype::F64, Dtype::I16, Dtype::U64] {
        let inputs: Vec<_> = (0..5).map(|n| random(dtype.size_bytes() * 77, n + 9)).collect();
        let plain = Case::new(dtype, Op::Sum, inputs.clone()).check(0);
        let (narrow, wide) = (inputs[..2].to_vec(), inputs[2..].to_vec());
        for to in [Width::Narrow, Width::Wide] {
            let case = Case { wide: wide.clone(), to, ..Case::new(dtype, Op::Sum, narrow.clone()) };
            assert!(case.check(1) == plain, "{dtype} {to:?}");
        }
    }
}

#[test]
fn an_average_is_rounded_once() {
    // 60000 + 60000 overflows binary16; the average does not.
    let large = half::f16::from_f32(60000.0).to_le_bytes().repeat(70);
    let inputs = vec![large.clone(), large.clone()];
    let case = Case { divisor: 2, ..Case::new(Dtype::F16, Op::Sum, inputs) };
    assert_eq!(case.check(0), large);
    // (256 + 1) / 257: a sum rounded to bf16 would give 0.996.
    let of = |value| half::bf16::from_f32(value).to_le_bytes().to_vec();
    let inputs = vec![of(256.0), of(1.0)];
    let case = Case { divisor: 257, ..Case::new(Dtype::Bf16, Op::Sum, inputs) };
    assert_eq!(case.check(0), of(1.0));
}

#[test]
fn the_output_may_be_the_first_input_of_either_width() {
    for dtype in SHORT {
        let (narrow, wide) = (random(dtype.size_bytes() * 500, 3), special(Dtype::F32, 500, 1));
        let others = [special(Dtype::F32, 500, 2)];
        for to in [Width::Narrow, Width::Wide] {
            let lists = vec![wide.clone(), others[0].clone()];
            let expected = Case { wide: lists, to, ..Case::new(dtype, Op::Sum, vec![]) }.check(0);
            let mut memory = wide.clone();
            let pointers = [memory.as_ptr(), others[0].as_ptr()];
            let (inputs, output) = (&[][..], memory.as_mut_ptr());
            let (op, numel, divisor) = (Op::Sum, 500, 1);
            let pass = Pass { dtype, op, inputs, wide: &pointers, output, to, numel, divisor };
            // SAFETY: the buffers hold 500 binary32s, and the output starts at the first one.
            unsafe { pass.run(Store::Streaming).unwrap() };
            assert!(memory[..expected.len()] == expected, "{dtype} {to:?}");
        }
        let lists = vec![others[0].clone()];
        let expected =
            Case { wide: lists, ..Case::new(dtype, Op::Sum, vec![narrow.clone()]) }.check(0);
        let mut memory = narrow.clone();
        let (inputs, wide) = ([memory.as_ptr()], [others[0].as_ptr()]);
        let (output, to) = (memory.as_mut_ptr(), Width::Narrow);
        let (op, inputs, wide) = (Op::Sum, &inputs[..], &wide[..]);
        let pass = Pass { dtype, op, inputs, wide, output, to, numel: 500, divisor: 1 };
        // SAFETY: as above.
        unsafe { pass.run(Store::Cached).unwrap() };
        assert!(memory == expected, "{dtype}");
    }
}

#[test]
fn an_average_of_integers_and_a_pass_without_inputs_are_refused() {
    let (mut memory, input) = ([7_u8; 8], [1_u8; 8]);
    let inputs = [input.as_ptr()];
    let (op, to, output) = (Op::Sum, Width::Narrow, memory.as_mut_ptr());
    let pass = Pass {
        dtype: Dtype::I32,
        op,
        inputs: &inputs,
        wide: &[],
        output,
        to,
        numel: 2,
        divisor: 2,
    };
    // SAFETY: both hold two elements.
    let refused =
        unsafe { (pass.run(Store::Cached), Pass { inputs: &[], ..pass }.run(Store::Cached)) };
    assert_eq!(refused.0, Err(KernelError::NoAverage { dtype: Dtype::I32 }));
    assert_eq!(refused.1, Err(KernelError::NoInput));
    assert_eq!(memory, [7; 8]);
    assert_eq!(Isa::Scalar.available(), Isa::Scalar);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random bits, mixture of widths and divisor.
    #[test]
    fn every_target_equals_scalar_on_any_mixture(
        (narrow, wide, elements) in (0_usize..6, 0_usize..6, 0_usize..300),
        (shift, divisor, to_wide) in (0_usize..64, 1_u64..9, any::<bool>()),
        (dtype, op) in (0_usize..SHORT.len(), 0_usize..4),
        seed in any::<u64>(),
    ) {
        prop_assume!(narrow + wide > 0);
        let (dtype, op) = (SHORT[dtype], Op::ALL[op]);
        let list = |count: usize, size: usize, salt: u64| -> Vec<Vec<u8>> {
            (0..count).map(|n| random(elements * size, seed ^ salt ^ n as u64)).collect()
        };
        let case = Case {
            dtype,
            op,
            inputs: list(narrow, dtype.size_bytes(), 0),
            wide: list(wide, 4, 77),
            to: if to_wide { Width::Wide } else { Width::Narrow },
            divisor,
        };
        case.check(shift);
    }
}

#[test]
fn the_output_may_be_the_first_partial_result_with_any_number_of_elements() {
    for dtype in SHORT {
        for (isa, numel) in [Isa::Scalar, Isa::chosen()].into_iter().zip([77, 5000]) {
            let (narrow, wide) =
                (random(dtype.size_bytes() * numel, 3), special(Dtype::F32, numel, 1));
            for to in [Width::Narrow, Width::Wide] {
                let lists = (vec![narrow.clone()], vec![wide.clone()]);
                let case = Case::new(dtype, Op::Sum, lists.0);
                let expected = Case { wide: lists.1, to, ..case }.check(0);
                let mut memory = wide.clone();
                let (inputs, partial) = ([narrow.as_ptr()], [memory.as_ptr()]);
                let (op, output, divisor) = (Op::Sum, memory.as_mut_ptr(), 1);
                let (inputs, wide) = (&inputs[..], &partial[..]);
                let pass = Pass { dtype, op, inputs, wide, output, to, numel, divisor };
                // SAFETY: both hold `numel` elements, and the output starts at the partial result.
                unsafe { pass.run_with(isa, Store::Cached).unwrap() };
                assert!(memory[..expected.len()] == expected, "{dtype} {to:?} {isa:?}");
            }
        }
    }
}
