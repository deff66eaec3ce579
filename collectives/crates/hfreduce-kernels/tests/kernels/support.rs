//! Shared test support: a pass over new memory with guard bytes around it, and special values.

use hfreduce_kernels::{Dtype, Isa, Op, Pass, Store, Width};

/// A pass that owns its inputs.
pub(crate) struct Case {
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) wide: Vec<Vec<u8>>,
    pub(crate) to: Width,
    pub(crate) divisor: u64,
}

impl Case {
    pub(crate) fn new(dtype: Dtype, op: Op, inputs: Vec<Vec<u8>>) -> Self {
        Self { dtype, op, inputs, wide: vec![], to: Width::Narrow, divisor: 1 }
    }

    /// A pass that rounds one wide input.
    pub(crate) fn rounding(dtype: Dtype, wide: Vec<u8>) -> Self {
        Self { wide: vec![wide], ..Self::new(dtype, Op::Sum, vec![]) }
    }

    /// The result of the pass over memory that starts `shift` bytes past an aligned address.
    pub(crate) fn run(&self, isa: Isa, store: Store, shift: usize) -> Vec<u8> {
        let narrow = self.inputs.first().map(|input| input.len() / self.dtype.size_bytes());
        let wide = self.wide.first().map(|input| input.len() / self.dtype.wide().size_bytes());
        let numel = narrow.or(wide).unwrap();
        let element = match self.to {
            Width::Narrow => self.dtype.size_bytes(),
            Width::Wide => self.dtype.wide().size_bytes(),
        };
        let inputs: Vec<_> = self.inputs.iter().map(|input| Placed::new(input, shift)).collect();
        let wide: Vec<_> = self.wide.iter().map(|input| Placed::new(input, shift)).collect();
        let pointers = |list: &[Placed]| list.iter().map(Placed::pointer).collect::<Vec<_>>();
        let mut output = Placed::new(&vec![GUARD; numel * element], shift);
        let pass = Pass {
            dtype: self.dtype,
            op: self.op,
            inputs: &pointers(&inputs),
            wide: &pointers(&wide),
            output: output.memory[output.start..].as_mut_ptr(),
            to: self.to,
            numel,
            divisor: self.divisor,
        };
        // SAFETY: every input and the output hold `numel` elements of their types.
        unsafe { pass.run_with(isa, store).unwrap() };
        output.content()
    }

    /// The scalar result, after a check that every target returns the same.
    pub(crate) fn check(&self, shift: usize) -> Vec<u8> {
        let expected = self.run(Isa::Scalar, Store::Cached, 0);
        for (isa, store) in targets() {
            let actual = self.run(isa, store, shift);
            assert!(
                actual == expected,
                "{} {} on {isa:?} {store:?}: {} inputs, {} wide, to {:?}, {} bytes + {shift}, / {}",
                self.dtype,
                self.op,
                self.inputs.len(),
                self.wide.len(),
                self.to,
                expected.len(),
                self.divisor
            );
        }
        expected
    }
}

const GUARD: u8 = 0xA5;
const LINE: usize = 64;

/// Bytes at a chosen offset from an aligned address, between guards.
struct Placed {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Placed {
    fn new(content: &[u8], shift: usize) -> Self {
        let bytes = content.len();
        let mut memory = vec![GUARD; bytes + 3 * LINE + shift];
        let start = memory.as_ptr().align_offset(LINE) + LINE + shift;
        memory[start..start + bytes].copy_from_slice(content);
        Self { memory, start, bytes }
    }

    fn pointer(&self) -> *const u8 {
        self.memory[self.start..].as_ptr()
    }

    fn content(&self) -> Vec<u8> {
        let end = self.start + self.bytes;
        let guards = self.memory[..self.start].iter().chain(&self.memory[end..]);
        assert!(guards.into_iter().all(|&byte| byte == GUARD), "wrote outside");
        self.memory[self.start..end].to_vec()
    }
}

/// Every type with each of its operations.
pub(crate) fn pairs() -> impl Iterator<Item = (Dtype, Op)> {
    let all = Dtype::ALL.into_iter().flat_map(|dtype| Op::ALL.map(|op| (dtype, op)));
    all.filter(|(dtype, op)| op.supports(*dtype))
}

/// Every instruction set of this processor, with both kinds of store.
pub(crate) fn targets() -> impl Iterator<Item = (Isa, Store)> {
    let stores = [Store::Cached, Store::Streaming];
    let present = Isa::ALL.into_iter().filter(|isa| isa.available() == *isa);
    present.flat_map(move |isa| stores.map(|store| (isa, store)))
}

/// The types that are combined in fp32.
pub(crate) const SHORT: [Dtype; 4] = [Dtype::Bf16, Dtype::F16, Dtype::F8E4M3, Dtype::F8E5M2];

/// Special values (zeros, subnormals, infinities, NaNs) as bits of each type, in an order that depends on
/// `phase`.
pub(crate) fn special(dtype: Dtype, elements: usize, phase: usize) -> Vec<u8> {
    const SINGLE: [u32; 16] = [
        0,
        0x8000_0000,
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0xFFC1_2345,
        0x7F81_0001,
        1,
        0x8000_0001,
        0x007F_FFFF,
        0x7F7F_FFFF,
        0xFF7F_FFFF,
        0x3F80_8000,
        0x3F81_8000,
    ];
    const HALF: [u16; 16] = [
        0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 1, 0x8001, 0x03FF,
        0x7BFF, 0xFBFF, 0x3C01, 0x0400,
    ];
    const BYTE: [u8; 16] =
        [0, 0x80, 0x38, 0xB8, 0x7C, 0xFC, 0x7F, 0xFF, 0x7D, 1, 0x81, 0x07, 0x7E, 0xFB, 0x7B, 0x08];
    const WIDE: [u64; 8] = [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 0x80, 0x7F, 0x8000_0000];
    let pick = |i: usize| (i * 7 + phase * 5 + i / 16 * phase) % 16;
    let mut bytes = Vec::with_capacity(elements * dtype.size_bytes());
    for i in 0..elements {
        match dtype {
            Dtype::F32 => bytes.extend(SINGLE[pick(i)].to_le_bytes()),
            Dtype::Bf16 => bytes.extend(((SINGLE[pick(i)] >> 16) as u16).to_le_bytes()),
            Dtype::F16 => bytes.extend(HALF[pick(i)].to_le_bytes()),
            Dtype::F64 => {
                let wide = f64::from(f32::from_bits(SINGLE[pick(i)])).to_bits();
                bytes.extend((wide | (pick(i) as u64 & 1)).to_le_bytes());
            }
            Dtype::F8E4M3 | Dtype::F8E5M2 => bytes.push(BYTE[pick(i)]),
            _ => {
                let wide = WIDE[pick(i) % 8].wrapping_mul(i as u64 | 1).to_le_bytes();
                bytes.extend(&wide[..dtype.size_bytes()]);
            }
        }
    }
    bytes
}

/// Random bits from a seed.
pub(crate) fn random(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..bytes).map(|_| byte()).collect()
}
