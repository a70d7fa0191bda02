// Intel's 14-bit reciprocal square root (vrsqrt14ps), as the numbers that define it: 64 straight lines.
//
// With them lanes.h computes the instruction's result on processors that lack it. Row = parity of the exponent * 32 +
// the upper 5 fraction bits. With i = the next 10 fraction bits, the result's fraction is
// (intercept - slope * i) >> 9, in units of 2^-16 of [0.5, 1). Exact even powers of two are special: 1.0.
//
// The lines were fitted to the instruction's output for all 2^24 fractions and parities of an AVX-512 Xeon
// (2026-11); tests/kernels/test_square_root.py compares every one of them again where there is AVX-512.
#pragma once

#include <stdint.h>

namespace {

struct Line {
  uint32_t intercept;
  uint32_t slope;
};

constexpr Line kReciprocalRootLines[64] = {
    {33551488u, 1001u}, {32526464u, 955u}, {31548032u, 915u}, {30611712u, 877u},
    {29714176u, 841u}, {28853120u, 807u}, {28026496u, 775u}, {27232384u, 747u},
    {26467584u, 719u}, {25731200u, 693u}, {25021312u, 669u}, {24336896u, 647u},
    {23675136u, 625u}, {23035136u, 603u}, {22417280u, 585u}, {21818752u, 567u},
    {21238656u, 549u}, {20676992u, 533u}, {20131712u, 517u}, {19602432u, 501u},
    {19089024u, 487u}, {18590080u, 473u}, {18105344u, 461u}, {17633664u, 449u},
    {17174400u, 437u}, {16727424u, 425u}, {16292608u, 415u}, {15867648u, 403u},
    {15454080u, 393u}, {15051520u, 385u}, {14657408u, 375u}, {14273792u, 367u},
    {13896320u, 707u}, {13171840u, 675u}, {12480000u, 647u}, {11817472u, 619u},
    {11183616u, 595u}, {10574720u, 571u}, {9990272u, 549u}, {9428096u, 527u},
    {8887936u, 509u}, {8367488u, 491u}, {7864960u, 473u}, {7380608u, 457u},
    {6912640u, 441u}, {6460672u, 427u}, {6023296u, 413u}, {5600640u, 401u},
    {5190528u, 389u}, {4792704u, 377u}, {4407168u, 365u}, {4033664u, 355u},
    {3670400u, 345u}, {3317504u, 335u}, {2974208u, 325u}, {2640896u, 317u},
    {2316544u, 309u}, {2000512u, 301u}, {1692544u, 293u}, {1392384u, 285u},
    {1100416u, 279u}, {814720u, 271u}, {536576u, 265u}, {264960u, 259u},
};

}  // namespace
